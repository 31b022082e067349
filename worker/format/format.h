/* format.h: the formats of stored checkpoints: which there are, how a directory or file is recognised, and what the files in it are called.
 * No other module spells these names. A format is a row in formats.def. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

#include "base/str.h"
#include "format/file_plan.h"
#include "format/source.h"

#define DCP_METADATA ".metadata"
#define DIST_CONFIG "metadata.json"
#define HF_INDEX "model.safetensors.index.json"

enum { FORMAT_FILE_MAX = 64, FORMAT_RANKS_MAX = 65536 };

enum format_role {
	FORMAT_OTHER,                  /* no part of a checkpoint */
	FORMAT_PAYLOAD,
	FORMAT_METADATA,
	FORMAT_TEMPORARY,              /* metadata that PyTorch has not renamed yet */
	FORMAT_MARK,                   /* says only of which format the files beside it are */
	FORMAT_FOLDER,                 /* a folder, its name followed by '/': payload files are in it, and in its folders */
};

enum format {
	FORMAT_NONE,
#define X(NAME, word, file, mark, ends, metadata, heads, open, plan_files, put_metadata, holds, first) FORMAT_##NAME,
#include "format/formats.def"
	FORMAT_COUNT,
};

struct format_file {
	enum format format;
	enum format_role role;
	int64_t rank;                  /* whose file it is, if the name says so; else -1 */
};

const char *format_name(enum format f);        /* "dcp", "dcp-rank-local", "safetensors", "torch"; "none" */
bool format_parse(struct str word, enum format *out);
enum { FORMAT_VALUES = 1, FORMAT_CHUNKS = 2, FORMAT_ARCHIVES = 4, FORMAT_VIEWS = 8, FORMAT_EMBEDS = 16 };
bool format_holds(enum format f, unsigned what);
/* Does dcpd write checkpoints of the format that are directories? */
bool format_makes_folders(enum format f);
/* The name of the format's one metadata file; NULL: it has none, or one per rank. */
const char *format_metadata(enum format f);
/* The files that say what lies where: a name or a pattern, for messages. */
const char *format_heads(enum format f);

/* Tells format, role and rank of a file by its name. False: no format has such a file (role FORMAT_OTHER). */
bool format_file(const char *name, struct format_file *out);
/* The same of a file in a checkpoint of that format. Names of files in folders are paths. */
bool format_file_in(enum format f, const char *name, struct format_file *out);
/* Is a folder of this path, which ends with '/', part of a checkpoint of any format? */
bool format_folder(const char *path);
/* Do checkpoints of the format lie there as DCP's files do, one .metadata for all? */
bool format_is_dcp(enum format f);
/* Does the text of DIST_CONFIG say that Megatron's dist_checkpointing wrote the checkpoint beside it? */
enum { DIST_CONFIG_MAX = 64 << 10 };
bool torch_dist_is(struct str config);
bool format_is_file(enum format f);            /* one file may be a whole checkpoint of the format */
/* The format of a checkpoint that is one file, by its name; by its first bytes, which count more: FORMAT_FIRST_BYTES of them, or all. */
enum { FORMAT_FIRST_BYTES = 512 };
enum format format_of_file(const char *name);
enum format format_of_bytes(const void *first, size_t n);
/* Do the first bytes deny what the name says? False where the format's files have no mark. */
bool format_denied(enum format f, const void *first, size_t n);

/* `dcpd-rank-00000-of-00004.safetensors`: the image of one rank of a state dict (image_open.c). */
struct format_image_name {
	uint64_t rank, world_size;     /* rank < world_size */
};
bool format_image_name(const char *name, struct format_image_name *out);
void format_image_payload(uint32_t rank, uint32_t world_size, char out[FORMAT_FILE_MAX]);

/* `{family}[_world_size_{N}]_rank[_]{R}.pt`: what each of the ranks of a job wrote beside the others. Borrows the name. */
struct format_rank_name {
	struct str family;
	int64_t world_size, rank;      /* world_size 0: the name does not say */
	bool is_model;                 /* the state dict itself, not the optimizer's or another */
};
bool format_rank_name(const char *name, struct format_rank_name *out);

/* `[bf16_|fp16_]zero_pp_rank_{R}_mp_rank_{M}_(model|optim)_states.pt`, `mp_rank_{M}_model_states.pt`: files of DeepSpeed's. */
struct format_zero_name {
	int64_t rank, model_rank;      /* data parallel, -1: of all ranks; model parallel */
	bool is_model;                 /* model_states, not optim_states */
};
bool format_zero_name(const char *name, struct format_zero_name *out);

/* The names in a directory, one by one, those of folders followed by '/', and the format that they say it has. */
struct format_listing {
	unsigned roles[FORMAT_COUNT];  /* bits: 1 << role */
	/* A directory of no format may hold checkpoints, of which it stands for the one that this file names, or for the last step. */
	const char *pointer;           /* NULL: none */
	uint64_t step_number;
	char step[FORMAT_FILE_MAX];    /* "": none */
};
void format_listing_add(struct format_listing *l, const char *name);
enum format format_of_listing(const struct format_listing *l);

/* `__{rank}.metadata`, `__{rank}_{index}.distcp`, `model-00001-of-00007.safetensors` (index from 0). */
void format_dcp_metadata(uint32_t rank, char out[FORMAT_FILE_MAX]);
void format_dcp_payload(uint32_t rank, uint64_t index, char out[FORMAT_FILE_MAX]);
void format_hf_payload(uint32_t index, uint32_t count, char out[FORMAT_FILE_MAX]);

/* The place of a checkpoint, as the reader of its format sees it. Names are sorted: by rank, then by their bytes. */
struct format_source {
	void *user;
	const char *const *metadata, *const *payload;  /* the files of the format; no payload files where metadata name them */
	uint64_t metadata_count, payload_count;
	/* All of a metadata file, compared with its manifest. *out: mem_free. */
	enum err (*read_all)(void *user, const char *name, void **out, uint64_t *n_out);
	/* Bytes of a payload file; read_head compares its first n with the manifest, and *out is the caller's (mem_free). */
	enum err (*read)(void *user, const char *name, uint64_t offset, void *into, uint64_t n);
	enum err (*read_head)(void *user, const char *name, uint64_t n, void **out);
	enum err (*bytes_of)(void *user, const char *name, uint64_t *out);
	void (*unchecked)(void *user, uint64_t n);     /* counts so many bytes of a head, read by parts, as unverified. May be NULL */
};

/* Opens a payload file of a source as parsers of items ask for it: sets *out, which uses `part`. */
struct format_part {
	const struct format_source *s;
	const char *name;
};
FALLIBLE enum err format_part_of(const struct format_source *s, const char *name, struct format_part *part, struct item_source *out);

bool format_reads(enum format f);
/* Reads what the checkpoint holds, and where the bytes of each chunk and value lie. ERR_FORMAT_…, ERR_CHECKPOINT_INCOMPLETE, and errors of
 * the source's functions. */
FALLIBLE enum err format_open(enum format f, const struct format_source *s, struct sdict **out);

/* Plans the files of a new checkpoint. The caller frees *out (file_plan_free), after an error too. */
FALLIBLE enum err format_plan_files(enum format f, const struct file_plan_target *t, struct file_plan *out);
/* The format's one metadata file, in pieces. sd: what was written; its locs say where. */
FALLIBLE enum err format_put_metadata(enum format f, const struct sdict *sd, const struct dcp_meta_opts *opts, dcp_meta_sink sink,
				      void *user);

/* The readers of formats.def, each in its NAME_open.c. What is in the scratch arena is needed only while they run. *out is NULL before;
 * format_open frees what is there after an error. */
FALLIBLE enum err format_open_dcp(const struct format_source *s, struct arena *scratch, struct sdict **out);
FALLIBLE enum err format_open_dcp_ranks(const struct format_source *s, struct arena *scratch, struct sdict **out);
FALLIBLE enum err format_open_torch_dist(const struct format_source *s, struct arena *scratch, struct sdict **out);
FALLIBLE enum err format_open_hf_dcp(const struct format_source *s, struct arena *scratch, struct sdict **out);
FALLIBLE enum err format_open_image(const struct format_source *s, struct arena *scratch, struct sdict **out);
FALLIBLE enum err format_open_hf(const struct format_source *s, struct arena *scratch, struct sdict **out);
FALLIBLE enum err format_open_npz(const struct format_source *s, struct arena *scratch, struct sdict **out);
FALLIBLE enum err format_open_delta(const struct format_source *s, struct arena *scratch, struct sdict **out);
FALLIBLE enum err format_open_gguf(const struct format_source *s, struct arena *scratch, struct sdict **out);
FALLIBLE enum err format_open_torch_ranks(const struct format_source *s, struct arena *scratch, struct sdict **out);
FALLIBLE enum err format_open_torch(const struct format_source *s, struct arena *scratch, struct sdict **out);
FALLIBLE enum err format_open_zero(const struct format_source *s, struct arena *scratch, struct sdict **out);
FALLIBLE enum err format_open_zero_universal(const struct format_source *s, struct arena *scratch, struct sdict **out);
