/* run.h: a planned job as flat tables in one memfd, shared by all workers of the gang.
 *
 * The leader plans once and builds the tables; every worker maps them and takes tasks from shared cursors until none is left, so
 * that a slow worker never holds up the others. Results (CRC32, XXH3-128, bytes done) are written back into the same tables.
 * Tables hold indices and offsets, never pointers. Only the bytes of tensors are elsewhere.
 *
 *   dst-driven task (files are written):   blocks → parts → dst → pieces → src
 *   src-driven task (memory is filled, or nothing: verify):  scans → src → pieces → dst
 *
 * A block is a range of one target file that is written at once: a slice of a big payload, or a run of many small items. */
#pragma once
#include <stdatomic.h>

#include "base/str.h"
#include "base/vec.h"
#include "io/digest.h"
#include "io/pace.h"
#include "tensor/stats.h"
#include "tensor/view.h"

struct checked;

enum run_file_kind {
	RUN_FILE_SOURCE,       /* opened for reading in dirs[dir] */
	RUN_FILE_TARGET,       /* opened for writing in dirs[dir]; made by the leader */
	RUN_FILE_SEGMENT,      /* descriptor fd_index of the run, mapped */
	RUN_FILE_MEMORY,       /* this process's own: offsets are addresses (libdcp) */
	RUN_FILE_SPOOL,        /* descriptor fd_index, read like a source file */
};

struct run_dir {
	bool is_source;                /* a checkpoint's that is read */
	uint32_t root;                 /* index into the worker's stores */
	uint32_t path_len;
	uint64_t path_at;              /* in the string pool */
};

struct run_file {
	uint8_t kind;
	bool direct;                   /* O_DIRECT */
	bool in_memory;                /* target on tmpfs: written at once, there is no disk to wait for */
	bool late;                     /* target: the leader ends it, not who writes its last block */
	bool writable;                 /* segments: map for writing */
	bool spread;                   /* other hosts bring some of this source's bytes (spread.h) */
	bool spare;                    /* a source that a node has in memory (memory.h), in place of a file: the run can do without */
	_Atomic uint32_t gone;         /* set once the node of a spare source does not answer */
	bool filling;                  /* a segment that its rank still fills: see gate.h */
	uint64_t ring_at, ring_bytes;  /* … round and round: where the ring begins; 0 bytes: it holds the whole image */
	uint32_t dir, fd_index, rank;
	uint32_t name_len;
	_Atomic uint32_t blocks_left;  /* target: the worker that brings it to 0 ends the file (store.h: parts) */
	uint64_t name_at, bytes;
	/* target: what an earlier checkpoint has of it (share.h) */
	bool sparse;                   /* room is taken by what is written, not beforehand */
	uint32_t base;                 /* 1 + that checkpoint's file, which this one is to be a link to if all digests are equal; 0: none */
	_Atomic uint32_t differs;      /* … and some are not: all of it is written; enum run_differs */
	uint64_t first_block, block_count;     /* … in file_blocks */
	uint32_t first_dst, dst_count;
	int64_t mtime_ns;              /* of such a file: when it was written */
};

enum run_src_kind {
	RUN_SRC_ITEM,                  /* a torch.save archive: header first, then payload */
	RUN_SRC_PLAIN,                 /* [offset, offset + length) is the payload in C order, or by strides_at: segments, safetensors */
	RUN_SRC_RAW,                   /* bytes without structure: a BYTE_IO item, a record of several views */
};

enum run_crc_state { RUN_CRC_UNSEEN, RUN_CRC_KNOWN, RUN_CRC_UNKNOWN };

struct run_src {
	uint8_t kind, dtype;
	bool sparse;                   /* src-driven, without checks: only the boxes that are needed are read */
	bool partial;                  /* src-driven: its scans do not cover the payload, so that its CRC32 says nothing */
	bool raw_digests;              /* its digests are of all bytes of the item, not of the payload's */
	bool by_blocks;                /* its scans are digest blocks: each is compared by itself */
	bool zeros;                    /* dst-driven: its elements are zeros, which blocks are before anything is read */
	uint8_t cast_count;
	uint8_t casts[VIEW_CASTS_MAX]; /* dtypes that its elements become, one after the other, before the target's */
	uint32_t view_of;              /* 1 + the source that this one is a view of, which checks its bytes; 0: none */
	uint64_t view_at;              /* a view: in dims: first element, then ndim strides, in elements of the other's box in C order */
	bool conj, neg;                /* PLAIN: lazy bits of a view */
	bool q8_0;                     /* PLAIN: float32 in C order, stored as blocks (tensor/quant.h) */
	uint32_t file, ndim, rank;
	uint32_t fqn_len, digest_count;
	uint64_t offset, length, fqn_at, dims_at;
	uint64_t strides_at;           /* PLAIN: 1 + where in `dims` the strides of a view are, in elements; 0: C order */
	uint32_t memory;               /* 1 + the segment that has its payload, too (memory.h); 0: none */
	uint64_t memory_at;            /* … where its first byte is there */
	_Atomic uint32_t memory_lost;  /* … and a block of it that differs: the rest comes from the file */
	uint32_t named_file;           /* errors name this place: not that in a spool */
	uint64_t named_at;
	uint64_t digest_at;            /* digest_count entries of `digests`: what a manifest says of this item */
	uint64_t shape_at;             /* verify: 1 + where in `dims` the tensor's shape is; 0: its content is not summed up */
	uint64_t edges_at;             /* verify: 1 + the entry of `digests` for the archive around the payload; 0: none */
	uint32_t gap;                  /* verify: so many bytes behind the item are zeros in a file of dcpd's */
	uint64_t first_piece;          /* src-driven: pieces are dst indices */
	uint64_t first_scan;           /* this source's scans are in a row */
	uint32_t piece_count, scan_count;
	_Atomic uint32_t scans_left;
	uint32_t crc_wanted;           /* of its record, or of its archive, set by whoever reads the head; see crc_state */
	_Atomic uint32_t crc_state;    /* enum run_crc_state */
	bool summed;                   /* the CRC32 of its payload is put together of what is copied or scanned (sums.h) */
	uint32_t record;               /* 1 + the source that is all of its record, which has the CRC32 (build_records.c); 0: none */
	uint32_t twin;                 /* 1 + the source that has the same bytes again, if those are compared with these; 0: none */
	_Atomic uint32_t sum_crc32;    /* … so far */
	_Atomic uint64_t sum_left;     /* … payload bytes that were not yet copied */
	_Atomic uint32_t damaged;      /* verify: its head, so that no more is looked at */
	_Atomic uint64_t unverified;   /* bytes that nothing could be compared with */
	uint32_t stats;                /* where options.values counts: its tensor's entry of `stats` */
	/* RUN_COMPARE_BOXES: how many elements differ, 1 + the first of them (in the chunk), and the bits of the largest differences:
	 * doubles that are not negative sort like their bits, NaN behind all */
	_Atomic uint64_t diff_count, diff_first, diff_max_abs, diff_max_rel;
};

/* Statistics of a tensor (struct stats), added up by all workers. Counts do not depend on the order of additions; sums do, and stay apart
 * by scans. */
struct run_stats {
	_Atomic uint64_t count, nan_count, inf_count, zero_count, min_key, max_key;
};
typedef _Atomic uint64_t run_bin;

enum run_dst_kind { RUN_DST_TENSOR, RUN_DST_RAW };

struct run_dst {
	uint8_t kind, dtype;
	bool small;                    /* the whole item lies in one block */
	bool bare;                     /* no archive around the payload (safetensors, segments) */
	bool q8_0;                     /* the payload is blocks (tensor/quant.h) of its elements, which are float32 */
	uint32_t file, ndim, rank, fqn_len;
	uint64_t offset;               /* of the item in the file or segment */
	uint64_t payload_off, payload_bytes, tail_off, length;  /* relative to offset; see item_layout */
	uint64_t fqn_at, dims_at, first_piece;
	uint64_t shape_at;             /* 1 + where in `dims` the tensor's shape is; 0: its content is not summed up */
	uint64_t box_at;               /* its box in that tensor: where dims_at is, but for items that a client has planned */
	uint64_t first_part, part_count;         /* in a row */
	uint64_t inline_at, inline_len;          /* RAW: bytes from the string pool instead of a source */
	uint32_t piece_count;
	uint32_t first_leg;                      /* a merge: its elements are the sum of options.leg_count dsts from here on; 0: copied */
	_Atomic uint32_t parts_left;
	uint32_t crc32;                          /* result */
	unsigned char xxh3_128[16];              /* result */
	unsigned char edges_xxh3[16];            /* result: of the archive around the payload; see manifest.h */
	uint32_t edges_base;                     /* 1 + the entry of `digests` that edges_xxh3 must equal for a link; 0: none */
	_Atomic uint32_t edges_deferred;         /* enum run_deferred */
};

struct run_part {
	uint32_t dst;
	uint32_t base;                 /* 1 + the entry of `digests` that xxh3_128 must equal for a link; 0: none */
	uint32_t crc32;                /* result */
	uint64_t begin, end;           /* of the payload, in bytes */
	uint64_t content;              /* result: its part of the tensor's sum (tensor_sum.h), if that is wanted */
	unsigned char xxh3_128[16];    /* result */
};

/* Of a file that is to be a link, and is not there before it is known whether it can be. MAKING: a worker is just making it. */
enum run_differs { RUN_UNDECIDED, RUN_MAKING, RUN_DIFFERS };
/* Of what a link may save the writing of. */
enum run_deferred { RUN_NOT_DEFERRED, RUN_DEFERRED, RUN_CLAIMED /* it must be written after all, by whoever has set this */ };

struct run_block {
	uint32_t file;
	_Atomic uint32_t deferred;     /* enum run_deferred */
	uint32_t part_count;
	uint64_t offset, bytes;        /* in the file; multiples of 4096 (bytes: padded with zeros) */
	uint64_t first_part;           /* index into block_parts */
};

/* A block of an earlier checkpoint's file, on a page boundary. Sorted by digest. */
struct run_base {
	unsigned char xxh3_128[16];
	uint64_t bytes;                /* 0: the manifest does not tell */
	uint64_t offset;
	uint32_t file;
};

struct run_scan {
	uint32_t src;
	uint32_t crc32;                /* result */
	bool from_memory;              /* result: it was copied from the source's segment, and compared */
	bool is_summed;                /* result: `content` is known */
	uint64_t begin, end;           /* of the payload, in bytes */
	uint64_t content;              /* result: its part of the tensor's sum (tensor_sum.h) */
};

/* A fault that verify found and went on. */
struct run_damage {
	uint32_t src;
	uint16_t code;                 /* enum err */
	uint8_t part;                  /* enum checked_part */
	uint64_t offset, bytes;        /* in the file */
};

enum run_stream_kind {
	RUN_STREAM_READ,               /* only its digest is wanted */
	RUN_STREAM_ENCODE,             /* how `now` differs from `base` goes to `out`, if it does */
	RUN_STREAM_DECODE,             /* base and blob make the new tensor, which goes to `out` */
};

/* A tensor that is read from its first byte to its last, in C order, by one worker: for a delta (format/delta_code.h). */
struct run_stream {
	uint8_t kind, encoding;        /* enum run_stream_kind; enum delta_encoding */
	bool adler32;                  /* of the new bytes, beside their XXH3-128 */
	uint32_t base, now;            /* dsts: all of the tensor; now: of ENCODE */
	uint64_t bytes;                /* of the tensor */
	uint32_t out_file, blob_file;
	uint64_t out_at;
	uint64_t blob_at, blob_bytes;  /* DECODE: the frame */
	/* results */
	uint64_t out_bytes;            /* ENCODE: 0: nothing differs */
	uint64_t changed;              /* ENCODE: bytes that differ */
	uint8_t fault;                 /* DECODE: enum delta_fault */
	uint32_t fault_code, checksum32, now_crc32;
	uint64_t fault_at;             /* in the frame */
	unsigned char base_xxh3[16], now_xxh3[16];
};

enum run_check_kind {
	RUN_CHECK_DIGEST,              /* of the first range and, behind it, the second one */
	RUN_CHECK_ZEROS,               /* the first range is zeros, which need no digest; else counted */
	RUN_CHECK_NOTHING,             /* nothing is known of the first range: counted as unverified */
};

/* Bytes of a file that are compared while it is copied. */
struct run_check {
	uint8_t kind;                  /* enum run_check_kind */
	uint64_t at[2], bytes[2];      /* in the file; all but those of a digest lie in one piece */
	unsigned char xxh3_128[16];
};

/* A piece of a file that is copied as it is. */
struct run_copy {
	uint32_t src;                  /* RAW: all of the file */
	uint32_t to;
	uint64_t offset, bytes;        /* in both */
	uint64_t first_check;
	uint32_t check_count;          /* in a row: those whose last byte lies in the piece */
};

/* One box on its way from a shard to a shard. */
struct run_move {
	uint32_t src, dst;
	uint64_t dims_at;              /* of the box: ndim global offsets, then sizes */
	uint32_t reduce;               /* moves with the same number > 0 in a row bring one box, reduced by `op` */
	uint16_t divisor;              /* of an average */
	uint8_t op;                    /* enum reduce_op */
	bool warm;                     /* the target's segment may hold the same bytes already; where `digests` has entries (2 a move) */
};

/* The bytes of a segment that a task reads, if that is still being filled (gate.h). */
struct run_gate {
	uint32_t file;
	uint64_t begin, end;
};

/* Bytes of a source's file that come from another host, or go there (spread.h). Sorted by file and number. */
struct run_spread_unit {
	uint64_t lo, hi;               /* in the file */
	uint64_t number;
	uint64_t at;                   /* in its window */
	uint32_t file, window;
	bool own;                      /* this host reads the unit */
	bool doubted;                  /* its bytes were not the checkpoint's: under the lock of struct spread_shared */
};

/* Units that are in memory together. */
struct run_spread_window {
	uint32_t state;                /* enum spread_state, under the lock of struct spread_shared */
	uint32_t left;                 /* scans that still need the window */
	uint32_t readers;              /* copies out of the window that are under way */
};

/* A work item of one worker: a run of blocks or of scans. A run that writes files has scans too: they check, once, the bytes that it
 * reads. */
struct run_task {
	uint64_t first;
	uint32_t count;
	uint32_t rank_index;           /* whose tasks these are */
	bool scan;
	uint32_t gate_count;
	uint64_t first_gate;
	uint64_t keep;                 /* of a ring: this task and those behind it read nothing below */
	_Atomic uint32_t done;         /* of a ring: its bytes are written */
};

struct run_rank {
	uint32_t rank;
	uint64_t first_task, task_count;
	_Atomic uint64_t next_task;    /* relative to first_task */
	_Atomic uint64_t tasks_done;   /* of a ring: the first ones, without a gap */
	uint32_t ring;                 /* 1 + the ring that its tasks read; 0: none */
	_Atomic uint64_t bytes_done;
	uint64_t bytes_total;
};

enum { RUN_LEGS_MAX = 16 };

enum run_mode {
	RUN_WRITE_FILES,               /* dst-driven */
	RUN_FILL_SEGMENTS,             /* src-driven, scatter into segments */
	RUN_VERIFY,                    /* src-driven, no target */
	RUN_STATS,                     /* the same, but damage ends it, and dsts bring elements that lie in no row */
	RUN_STREAMS,                   /* tensors as streams of bytes; tasks are runs of `streams` */
	RUN_DIFF,                      /* dst-driven: parts are pairs, A's and B's of the same elements; pair i fills diffs[i] */
	RUN_COPY_FILES,                /* tasks are runs of `copies`: pieces of files, as they are */
	RUN_MOVE_BOXES,                /* tasks are runs of `moves`: from segment to segment (state_dict_op_run.c, exchange.c) */
	RUN_COMPARE_BOXES,             /* the same, but `dst` is a source, too: both are compared */
};

#define RUN_TABLES(X)                       \
	X(struct run_dir, dirs)             \
	X(struct run_file, files)           \
	X(struct run_src, srcs)             \
	X(struct run_dst, dsts)             \
	X(uint32_t, pieces)                 \
	X(struct block_digest, digests)       \
	X(struct run_part, parts)           \
	X(struct run_block, blocks)         \
	X(uint64_t, block_parts)            \
	X(struct run_base, bases)           \
	X(uint64_t, file_blocks)            \
	X(struct run_scan, scans)           \
	X(struct run_task, tasks)           \
	X(struct run_gate, gates)           \
	X(struct run_stream, streams)       \
	X(struct run_copy, copies)          \
	X(struct run_check, checks)         \
	X(struct run_rank, ranks)           \
	X(struct run_move, moves)           \
	X(struct run_damage, damages)       \
	X(struct run_spread_unit, spread_units)     \
	X(struct run_spread_window, spread_windows) \
	X(struct stats_diff, diffs)         \
	X(struct run_stats, stats)          \
	X(struct stats_sums, sums)          \
	X(run_bin, bins)                    \
	X(int64_t, dims)                    \
	X(char, strings)

struct run_table {
	uint64_t at, n;
};

/* Workers that may take a task. */
enum run_takers {
	RUN_TAKE_ANY,
	RUN_TAKE_OWN,                  /* the tasks of a rank are one worker's: all bytes of a file come from one process */
	RUN_TAKE_FIRST,                /* all are the leader's, for the same reason: tasks write files of several ranks */
};

struct run_options {
	enum run_mode mode;
	enum run_takers takers;
	bool verify;                   /* check digests of what is read */
	bool past_cache;               /* scans are the only readers of their bytes: what is not in the page cache is read past it */
	bool no_sync;                  /* target files are not fsynced */
	bool values;                   /* fill `stats`, with `sums` (an entry a scan) and `bins` (STATS_BINS a tensor) where those are */
	enum pace_kind pace;
	uint32_t task_bytes;           /* largest block or scan */
	uint32_t leg_count;            /* a merge: of each dst that is an average, and what they are multiplied by */
	double weights[RUN_LEGS_MAX];
	struct stats_near near;        /* of a diff or compare */
};

struct run_head {
	uint64_t magic, total_bytes;
	uint64_t room_at;              /* memory behind the tables, on a huge page: all workers have it */
	struct run_options opts;
#define X(type, name) struct run_table name;
	RUN_TABLES(X)
#undef X
	_Atomic uint64_t verified_bytes, memory_bytes, neighbour_bytes, read_bytes, needed_bytes, moved_bytes;
	_Atomic uint64_t shared_bytes; /* that an earlier checkpoint has, and nobody wrote */
	_Atomic uint64_t damage_count; /* the first damages_n of them are listed */
	_Atomic uint32_t sealed;       /* all segments are: none is being filled any more */
	_Atomic uint32_t cancelled;    /* set by any worker that fails: the others stop taking tasks */
};

/* A source that is a part of a record. begin, end: in the record. */
struct run_record_part {
	uint32_t src, file, crc32;     /* of the run; CRC32 of the record */
	uint64_t offset, length, begin, end;
};

/* The tables while the leader builds them. */
struct run_build {
	struct run_options opts;
#define X(type, name) struct vec(type) name;
	RUN_TABLES(X)
#undef X
	struct vec(struct run_record_part) record_parts;       /* workers need none */
	uint64_t room;                 /* bytes behind the tables, zeros */
};

/* The tables as every worker sees them. */
struct run {
	struct run_head *head;
	uint64_t bytes;
	int fd;
#define X(type, name) type *name; uint64_t name##_n;
	RUN_TABLES(X)
#undef X
};

void run_build_free(struct run_build *b);
FALLIBLE enum err run_add_string(struct run_build *b, struct str s, uint64_t *at_out);
/* dims: ndim offsets, then ndim sizes. */
FALLIBLE enum err run_add_dims(struct run_build *b, const int64_t *dims, uint32_t ndim, uint64_t *at_out);
FALLIBLE enum err run_add_dir(struct run_build *b, uint32_t root, struct str path, uint32_t *index_out);
FALLIBLE enum err run_add_file(struct run_build *b, enum run_file_kind kind, uint32_t dir, struct str name,
			       uint64_t bytes, uint32_t *index_out);

/* Copies the tables into a new memfd and maps it. The build can be freed then. */
FALLIBLE enum err run_share(const struct run_build *b, struct run *out);
/* Maps a memfd made by run_share; it is owned by `out` from then on, on success only. */
FALLIBLE enum err run_attach(int fd, struct run *out);
void run_detach(struct run *r);

struct str run_str(const struct run *r, uint64_t at, uint64_t len);
static inline void *run_room(const struct run *r)
{
	return (unsigned char *)r->head + r->head->room_at;
}
static inline struct str run_src_fqn(const struct run *r, const struct run_src *s)
{
	return run_str(r, s->fqn_at, s->fqn_len);
}
/* The number of the source that has the bytes of source `src`: itself, but for a view. */
static inline uint32_t run_src_base(const struct run_src *s, uint32_t src)
{
	return s->view_of ? s->view_of - 1 : src;
}
static inline struct str run_dst_fqn(const struct run *r, const struct run_dst *d)
{
	return run_str(r, d->fqn_at, d->fqn_len);
}
static inline struct str run_file_name(const struct run *r, const struct run_file *f)
{
	return run_str(r, f->name_at, f->name_len);
}
/* The bytes that a segment must have: of its image, or of the ring that the image comes through and the page behind. */
uint64_t run_file_span(const struct run_file *f);
/* As errors and lists name a file, with a NUL in `room`: its name in the checkpoint; where a run reads several, its path in the storage. */
const char *run_file_label(const struct run *r, uint32_t file, char room[ERR_FILE_MAX]);
/* The next task for worker `index` of `count`: its own ranks first, then whatever is left. False: none left. */
bool run_take_task(struct run *r, uint32_t index, uint32_t count, uint64_t *task_out);
/* Sets who takes tasks, so that one process writes all of a file: a store that sends parts on while they are written (store.h) has no
 * other way to bring pieces of several together. */
FALLIBLE enum err run_write_whole_files(struct run *r);
uint64_t run_bytes_done(const struct run *r);
uint64_t run_bytes_total(const struct run *r);
/* Adds to `checked` how much the run compared, what it could not compare, and the damage that it found. */
void run_checked(const struct run *r, struct checked *checked);
/* Adds what a scan has seen to the figures of its tensor. */
void run_note_stats(struct run *r, uint64_t scan, const struct stats *s, const uint64_t *bins);
/* RUN_COMPARE_BOXES: adds what differs in a part of A's source to what is known: counts, the first element, the largest differences. */
void run_note_difference(struct run_src *src, const struct stats_diff *diff);
