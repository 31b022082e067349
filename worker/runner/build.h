/* build.h: from plans to a run's tables: which blocks the target files have, which ranges of the sources are read. */
#pragma once
#include "format/format.h"
#include "plan/load_plan.h"
#include "runner/run.h"
#include "store/checkpoint.h"
#include "tensor/box.h"
#include "tensor/sdict.h"

enum {
	BUILD_TASK_BYTES = 4 << 20,      /* a block or scan: large for the disk's sake */
	BUILD_WIDE_TASK_BYTES = 16 << 20, /* … where the target runs across rows of the source: longer pieces of each row */
	BUILD_MEMORY_TASK_BYTES = 512 << 10, /* … on tmpfs, and of averages: small, so that it stays in the CPU's cache */
	BUILD_STREAM_BYTES = 1 << 20,    /* of a tensor that is read as a stream, at a time */
	BUILD_SMALL_BYTES = FILE_PLAN_SMALL,
	BUILD_GROUP_MAX = 64,            /* target chunks that are filled side by side from the same rows */
	BUILD_BLOCKS_MAX = 1 << 24,      /* of one run: sizes come from metadata, and none may fill memory with a plan */
};

/* Is there room for `more` blocks behind the `n` that are there? ERR_LIMIT_EXCEEDED. */
static inline FALLIBLE enum err build_room(uint64_t n, uint64_t more)
{
	if (n > BUILD_BLOCKS_MAX || more > BUILD_BLOCKS_MAX - n)
		return ERR(LIMIT_EXCEEDED, "a job of more than %d blocks", BUILD_BLOCKS_MAX);
	return OK;
}

/* Adds the checkpoint's directory and files; file_map_out[i]: run file of sd file i (mem_free). Transformed items must be in a spool by
 * now (spool.h). */
FALLIBLE enum err build_source_files(struct run_build *b, const struct checkpoint *c, uint32_t **file_map_out);

/* How the chunks of a checkpoint are stored. */
static inline enum run_src_kind build_kind(const struct checkpoint *c)
{
	return format_holds(c->format, FORMAT_ARCHIVES) ? RUN_SRC_ITEM : RUN_SRC_PLAIN;
}

/* Adds every chunk of sd as a source, then every stored value as a raw one. file_map: sd file → run file. manifest may be NULL.
 * *first_out: the number of chunk 0's source; values follow the chunks. */
FALLIBLE enum err build_sources(struct run_build *b, const struct sdict *sd, enum run_src_kind kind,
				const uint32_t *file_map, const struct manifest *manifest, uint32_t *first_out);

/* Adds a source for every view, in a row. base: the run source of each number that a view's source can be. *first_out: the first. */
FALLIBLE enum err build_views(struct run_build *b, const struct sdict *sd, const struct view *views, const uint32_t *base,
			      uint32_t *first_out);

/* Adds a file of the directory `dir` of the run, whole, as a raw source without an FQN. */
FALLIBLE enum err build_other_source(struct run_build *b, uint32_t dir, struct str name, uint64_t bytes, const struct manifest *manifest,
				     uint32_t *src_out);

/* A run that copies files as they are, each byte compared with what the manifest of the checkpoint `source` knows of it. Sets mode and
 * task_bytes. Files are added one by one; build_copies_end() gives the run its tasks. */
struct build_copies {
	const struct checkpoint *source;       /* NULL, or without a manifest: nothing is known */
	uint32_t from, to;             /* dirs of the run */
	bool direct, in_memory;        /* of the target */
};
struct build_copy {
	struct str name;               /* ends with a NUL */
	struct str target;             /* p NULL: the same name */
	uint64_t bytes;
	const unsigned char *digest;   /* XXH3-128 of all of it; NULL: as the manifest lists it */
};
struct build_copier;
FALLIBLE enum err build_copies_begin(struct run_build *b, const struct build_copies *how, struct build_copier **out);
FALLIBLE enum err build_copies_add(struct build_copier *k, const struct build_copy *file);
FALLIBLE enum err build_copies_end(struct build_copier *k);
void build_copies_free(struct build_copier *k);

/* For those who only check: a source that the manifest knows by all its bytes is read as that, whatever its metadata call it. Of several
 * in one such item the first stands for all. */
FALLIBLE enum err build_raw_sources(struct run_build *b, const struct sdict *sd, const struct manifest *m, uint32_t first);

/* For verify: a source that is a part of a record is read as the record, which alone has a CRC32; the first stands for all in it. */
FALLIBLE enum err build_records(struct run_build *b, const struct sdict *sd, uint32_t first);

/* For verify: adds the index at the end of each file (format/dcp_index.h) as a source, which no metadata name. sd: of all of it. */
FALLIBLE enum err build_indexes(struct run_build *b, const struct sdict *sd, const uint32_t *file_map, const struct manifest *m);

/* How much of a source a run takes, and once: WHOLE ones are put together to their record's CRC32, if they are a part of one. */
enum build_taken { BUILD_NOT_TAKEN, BUILD_TAKEN, BUILD_TAKEN_WHOLE };
/* For all others: records whose parts are taken, so that nearly all of them is read, are compared. Adds a source for each, and behind it
 * those of bytes that no part has (build_is_rest): these need scans. taken: by source, an enum build_taken. */
FALLIBLE enum err build_record_sums(struct run_build *b, uint8_t *taken);
static inline bool build_is_rest(const struct run_src *s)
{
	return s->kind == RUN_SRC_RAW && s->record;
}

/* For verify, of sources from `first` on: the digests of the archives around payloads, and the zeros behind items. */
FALLIBLE enum err build_edges(struct run_build *b, const struct manifest *m, uint32_t first);

/* Of a source: its elements' bytes, or all bytes of a raw one. */
FALLIBLE enum err build_payload_bytes(const struct run_build *b, const struct run_src *s, uint64_t *out);
/* Finds which of its digests can be compared, drops the others, and says whether there is anything to compare the source with. bytes: of
 * its payload. */
bool build_comparable(struct run_build *b, struct run_src *s, uint64_t bytes);

/* Finds the sources of a run that are copied whole, each byte once: their CRC32s are put together of what is copied (sums.h), and no scan
 * reads them a second time. Add every box that a target takes, then end. */
struct build_sums {
	struct build_sum *srcs;        /* by source, of those that are no views */
	uint64_t count;
	struct vec(struct build_sum_view) views;
};
FALLIBLE enum err build_sums_begin(const struct run_build *b, struct build_sums *out);
/* The target's box takes what it has in common with source `src`, which may be a view. dims: offsets, then sizes. */
FALLIBLE enum err build_sums_add(const struct run_build *b, struct build_sums *s, uint32_t src, const int64_t *dims);
/* All bytes of a raw source are taken, as they are. */
void build_sums_add_raw(const struct run_build *b, struct build_sums *s, uint32_t src);
/* Sets `summed` of those sources, and `unverified` of those that nothing can be compared with. */
FALLIBLE enum err build_sums_end(struct run_build *b, struct build_sums *s);
void build_sums_free(struct build_sums *s);
/* All of that for a load of views: the target's chunks take their boxes from sources from `first_src` on. Replicas take elements twice:
 * their sources are not summed. */
FALLIBLE enum err build_load_sums(struct run_build *b, const struct sdict *target, uint32_t first_src, const struct load_plan *plan);
/* Must the source be read by scans to be compared? Else it is summed, or there is nothing to compare it with. */
static inline bool build_needs_scans(const struct run_src *s)
{
	return build_is_rest(s) || (!s->zeros && !s->summed && !s->record && !atomic_load(&s->unverified));
}

/* Cuts all of a source into scans, in a row; nothing if it was cut before. */
FALLIBLE enum err build_scans(struct run_build *b, uint32_t src);

/* Files and offsets of a target checkpoint's items. */
struct build_place {
	uint32_t file;                 /* run file */
	uint32_t dst;
	uint64_t offset, length;
};

/* See struct file_plan_crc. */
struct build_crc {
	uint64_t offset;
	uint32_t file, dst;            /* of the run */
	uint32_t leading_crc32;
};

/* Targets that are averages of the same tensors in several checkpoints. */
struct build_merge {
	uint32_t count;                /* of checkpoints */
	const double *weights;
	bool wide;                     /* accumulated in 64 bits even where elements have less */
	const uint32_t *chunk;         /* per chunk of the target: its number in the plans, or UINT32_MAX: copied */
	const struct load_plan *plans; /* per checkpoint: its sources of each chunk, from first_src of it on */
	const uint32_t *first_src;
};

/* A file that is copied as it is: one that no format knows. */
struct build_other {
	struct str name;
	uint64_t bytes;
	uint32_t src;
};

struct build_target {
	enum format format;
	struct sdict *sd;              /* chunks and values with their writer's rank; locs are those of the sources for values */
	const struct load_plan *pieces;/* sources of each chunk, as indices that `first_src` is added to */
	uint32_t first_src;
	const uint32_t *value_src;     /* per value: run source, or UINT32_MAX: its inline bytes */
	uint32_t dir;                  /* run dir of the staging directory */
	uint32_t world_size, files_per_rank;
	uint64_t number;               /* of each rank's first file (format/file_plan.h) */
	bool direct;                   /* O_DIRECT */
	bool in_memory;                /* the target is on tmpfs */
	bool cut;                      /* see file_plan.h */
	uint32_t task_bytes;
	const struct build_merge *merge;       /* NULL: all is copied */
	bool is_wide;                  /* blocks run across the rows of the source: chunks are filled one by one */
	bool check_sources;            /* what is read is compared with its digests or CRC32s, by scans */
	uint32_t first_replica, replica_count;   /* sources that are not written but hashed (their scans' CRC32s) */
	const struct file_plan_given *given;   /* NULL: the format chooses the files */
	uint64_t span_bytes;           /* see file_plan.h: sources come through rings, each item from one; 0: they do not */
	uint64_t max_file_bytes;       /* 0: the format's own limit */
	struct str file_name;          /* see file_plan.h */
	const struct build_other *others;      /* files beside those that the format plans */
	uint64_t other_count;
	const struct gguf_head *gguf;  /* see file_plan.h */
	const struct delta_head *delta; /* … */
	const struct str (*meta)[2];   /* pairs for the files' headers, if the format has such */
	uint64_t meta_count;
	const bool *local;             /* per rank: its tasks are done here; NULL: all. What others write has its place all the same */
	/* filled in */
	struct build_place *chunk_places, *value_places;   /* mem_free */
	struct vec(struct build_crc) crcs;     /* vec_free */
	uint64_t bytes;                /* of all files */
};

/* The target's files as the format plans them (format/file_plan.h), and the blocks that fill them. */
FALLIBLE enum err build_target_files(struct run_build *b, struct build_target *t);

/* Loads: target chunks lie in segments (sd locs say where). segment_files: run file of each of sd's files. b->opts.verify is set by now:
 * what is compared with digests is read by whole digest blocks, and wholly where there is but one digest or CRC32. */
FALLIBLE enum err build_fill(struct run_build *b, const struct sdict *target, const uint32_t *segment_files,
			     const struct sdict *source, uint32_t first_src, const struct load_plan *plan);
/* The same of sources that are views, which the read plan brings to their places; what they are views of is read once more, to be compared
 * with its digests. */
FALLIBLE enum err build_fill_views(struct run_build *b, const struct sdict *target, const uint32_t *segment_files, uint32_t first_src,
				   const struct load_plan *plan);
/* Verify: every byte of every source from first_src on. */
FALLIBLE enum err build_verify(struct run_build *b, uint32_t first_src);
/* Gives each tensor of the `count` sources from `first` on an entry of `stats`. They are in the order of build_sources. */
FALLIBLE enum err build_stats(struct run_build *b, uint32_t first, uint64_t count);
/* Stats: every element of every source from `first` on, all of them tensors, with sums and bins. */
FALLIBLE enum err build_all_stats(struct run_build *b, uint32_t first);
/* Diff: chunk by chunk of a; b_plan says where b has the same elements. */
FALLIBLE enum err build_diff(struct run_build *b, const struct sdict *a, uint32_t first_a, uint32_t first_b,
			     const struct load_plan *b_plan);
/* A tensor's whole box as a dst of a run of streams. plan: without replicas, its chunks' sources are those from `first_src` on. */
FALLIBLE enum err build_stream_tensor(struct run_build *b, const struct sdict *plan, uint64_t tensor, uint32_t first_src,
				      uint32_t *dst_out);
/* The run's streams are all there: makes a task of each, behind scans of what it reads if b->opts.verify is set. */
FALLIBLE enum err build_streams(struct run_build *b);
