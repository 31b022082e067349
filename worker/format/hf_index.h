/* hf_index.h: the index of a directory in Hugging Face's layout, which says in which file a tensor lies. Both of safetensors files and of
 * torch.save's. */
#pragma once
#include "base/map.h"
#include "base/vec.h"
#include "format/format.h"

/* A tensor of the index, and the file that the index says it lies in. */
struct hf_home {
	struct str fqn;
	uint32_t file;                 /* into `files` */
	bool found;
};

/* A file that the index names. */
struct hf_file {
	struct str name;
	uint64_t room;                 /* how many more tensors the file can describe */
};

/* Reads the safetensors header of a payload file (hf_open.c) into `arena` and *text_out (NULL before; mem_free, after an error too). */
struct sft;
FALLIBLE enum err hf_open_header(const struct format_source *s, const char *name, struct arena *arena, struct sft *out, void **text_out);

struct hf_index_limits {
	uint64_t head_max, entry_min;  /* the most bytes of a file that describe tensors; the fewest that describe one */
	enum err bad;                  /* the code of errors in the text */
	bool is_delta;                 /* it must be the index of a delta, or of none: recognised by its first bytes */
};

struct hf_index {
	const struct format_source *s;
	struct arena *arena;
	void *text;                    /* FQNs point into it */
	struct vec(struct hf_file) files;
	struct vec(struct hf_home) homes; /* one per tensor of the index */
	struct map by_file, by_fqn;
	bool there;
	bool is_delta;                 /* its metadata name a delta_encoding: tensors are what changed, compressed */
	const struct hf_index_limits *limits;
	struct sdict *sd;              /* being made */
};

/* Makes an sdict of the directory by opening each file of it: those that the source's one metadata file names, or all payload files if
 * there is none. ix->sd has the file as number `file`. ERR_CHECKPOINT_INCOMPLETE unless each tensor that the index names was found in the
 * file that it names. */
typedef enum err hf_open_file(struct hf_index *ix, const char *name, uint32_t file);
FALLIBLE enum err hf_index_open(const struct format_source *s, const struct hf_index_limits *limits, hf_open_file *open_file,
				struct arena *scratch, struct sdict **out);
/* Is the tensor to be taken from this file? Of one that several hold (tied weights), the index names one. Marks it as found. */
bool hf_index_takes(struct hf_index *ix, struct str fqn, struct str file);
