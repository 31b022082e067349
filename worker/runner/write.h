/* write.h: from a planned target to a visible checkpoint: staging, the run, metadata, manifest, commit. save and reshard end here. */
#pragma once
#include "runner/build.h"
#include "session/job.h"
#include "store/commit.h"

struct write_ready;

/* A store that is not this host's alone: what a save does otherwise there (hosts.h). */
struct write_store {
	/* The staging directory. NULL: this host's own */
	enum err (*stage)(void *user, struct job *j, struct staging *out);
	/* This host's bytes are written. *ends_out: it commits nothing; another host does, or has. NULL: they are all */
	enum err (*written)(void *user, struct job *j, struct run *run, struct staging *st, bool *ends_out);
	const bool *local;             /* per rank: its files are written here; NULL: all */
	void *user;
};

struct write_spec {
	struct run_build *build;       /* with the sources in it */
	struct sdict *target;          /* what to write; locs of values are those of the source */
	const struct load_plan *pieces;
	const struct sdict *source;    /* whose chunks `pieces` means; NULL: all of them are the target's, whole */
	uint32_t first_src;
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
	const struct write_store *store;       /* NULL: this host's alone */
	const struct file_plan_given *given;       /* files and items as the client chose them; then `.metadata` is its too: */
	struct str metadata;           /* p NULL: none yet, a dry run */
	const char *metadata_name;
	const struct str (*meta)[2];   /* see file_plan.h */
	uint64_t meta_count;
	json_t *shown;                 /* conversion rules: what the plan shows as "transform"; NULL: nothing */
	bool again;                    /* set by write_again */
	struct write_ready *ready;     /* on success gets what write_again needs; may be NULL. Then build and places are its */
};
/* What was written, ready to be written again with other bytes of the same sizes. */
struct write_ready {
	struct run_build build;
	uint64_t strings_n;            /* of the strings that stay */
	struct build_target target;    /* owns its places */
	json_t *plan;                  /* what GET …/plan shows */
};
void write_ready_free(struct write_ready *r);
/* The same once more: the target's locs are known. *stale_out: the place is of another kind than it was, nothing was done. */
FALLIBLE enum err write_again(struct job *j, struct write_spec *s, struct write_ready *r, bool *stale_out);
/* Fills j->result with {"checkpoint","bytes","files","tensors","values","world_size",…}; for a dry run with the plan. */
FALLIBLE enum err write_checkpoint(struct job *j, struct write_spec *s);
