/* write.h: from a planned target to a visible checkpoint: staging, the run, metadata, manifest, commit. save and reshard end here. */
#pragma once
#include "runner/content_sums.h"
#include "runner/share.h"
#include "store/commit.h"

struct write_ready;
/* A uuid4, as the save_id of metadata. */
void write_uuid(char out[37]);
struct write;

/* How what is written gets into its store. write_alone stages and publishes; a save of several hosts wraps that (hosts.h). */
struct write_store {
	enum err (*stage)(const struct write_store *s, struct job *j, struct staging *out);
	/* All bytes of this host are written: publishes them with those of others, or leaves that to the host that leads. */
	enum err (*publish)(const struct write_store *s, struct write *w);
	const bool *local;             /* per rank: its files are written here; NULL: all */
	bool is_shared;                /* others make the same plan: it may not depend on anything of this host */
	void *user;
};
extern const struct write_store write_alone;

struct write_spec {
	struct run_build *build;       /* with the sources in it */
	struct sdict *target;          /* what to write; locs of values are those of the source */
	const struct load_plan *pieces;
	const struct sdict *source;    /* whose chunks `pieces` means; NULL: all of them are the target's, whole */
	uint32_t first_src;
	const struct build_merge *merge;       /* NULL: all is copied */
	const uint32_t *value_src;     /* per value of target: run source or UINT32_MAX (inline) */
	uint32_t world_size;
	enum format format;
	bool has_generation;
	uint64_t generation;
	bool check_sources;            /* compare what is read with its digests (options.verify) */
	uint32_t first_replica, replica_count;   /* sources to hash only */
	/* called when all bytes are written, before anything is visible; its error ends the job. May be NULL */
	enum err (*after_run)(void *user, const struct run *run, const struct build_place *chunk_places);
	void *user;
	const struct write_store *store;       /* NULL: write_alone */
	const struct file_plan_given *given;       /* files and items as the client chose them; then `.metadata` is its too: */
	struct str metadata;           /* p NULL: none yet, a dry run */
	const char *metadata_name;
	struct strs hosts;             /* ids of what other hosts have written for it (hosts.h) */
	struct content_items *items;   /* what the items are tensors of */
	const struct gguf_head *gguf;  /* see file_plan.h */
	const struct build_other *others;      /* files that travel along, and their sources */
	uint64_t other_count;
	const struct delta_head *delta; /* … */
	const struct str (*meta)[2];
	uint64_t meta_count;
	bool transposes;               /* conversion rules: blocks of the target take columns of the source */
	json_t *shown;                 /* conversion rules: what the plan shows as "transform"; NULL: nothing */
	bool again;                    /* set by write_again */
	struct write_ready *ready;     /* on success gets what write_again needs; may be NULL. Then build and places are its */
};
/* A target being written. */
struct write {
	struct job *job;
	struct write_spec *spec;
	const struct build_target *target;
	struct staging *staging;
	const struct share *share;
	struct run *run;
	const json_t *plan;            /* what GET …/plan shows */
};
/* Writes metadata and manifest, and publishes. */
FALLIBLE enum err write_publish(struct write *w);

/* A finished write that can be repeated with other bytes of the same sizes. */
struct write_ready {
	struct run_build build;
	uint64_t strings_n;            /* of the strings that stay */
	struct build_target target;    /* owns its places */
	struct share_marks marks;
	json_t *plan;                  /* what GET …/plan shows */
};
void write_ready_free(struct write_ready *r);
/* The same once more: the target's locs are known. *stale_out: the place is of another kind than it was, nothing was done. */
FALLIBLE enum err write_again(struct job *j, struct write_spec *s, struct write_ready *r, bool *stale_out);
/* Fills j->result with {"checkpoint","bytes","files","tensors","values","world_size",…}; for a dry run with the plan. */
FALLIBLE enum err write_checkpoint(struct job *j, struct write_spec *s);
