/* checkpoint.h: a stored checkpoint, opened: recognised by content, its metadata parsed, its manifest read. */
#pragma once
#include <sys/stat.h>
#include "format/format.h"
#include "spec/ref.h"
#include "store/checked.h"
#include "store/manifest.h"
#include "store/store.h"
#include "tensor/sdict.h"

enum { CHECKPOINT_NAME_MAX = 4096 };

/* Facts that a repair knows better than the files say (checkpoint_open_instead). */
struct checkpoint_instead {
	enum format format;            /* FORMAT_NONE: as the files say */
	const char *metadata;          /* the file of this name is not read, there or not: */
	struct str bytes;              /* these are, and compared with nothing; p NULL: it is left out */
	bool no_manifest;              /* is not read either */
	bool keeps_lost;               /* items that are lost with their files keep the places that they had */
};

struct checkpoint {
	const struct checkpoint_instead *instead;      /* while it is opened; NULL: nothing */
	uint32_t shares;               /* to be freed so many times more */
	enum format format;
	const struct store *store;
	char name[CHECKPOINT_NAME_MAX]; /* in the store */
	bool single;                   /* `name` is a file, which is the whole checkpoint */
	struct store_at dir;           /* with its files */
	struct store_at reading;       /* while it is opened: the file of this name */
	char reading_name[1024];
	struct sdict *sd;
	struct manifest *manifest;     /* NULL: not ours, or outdated */
	char outdated[64];             /* "": none; else the metadata file that PyTorch has written since, with all others */
	uint64_t *file_bytes;          /* per sd file, by stat */
	uint64_t metadata_bytes, unchecked_bytes; /* of all metadata files; of those that no manifest has a digest of */
	struct stat metadata;          /* the .metadata that was parsed, as it was before; of a rank-local one: the last */
	uint32_t world_size;           /* 1 + the highest rank in a file name */
	struct checked *verifies;      /* set by verify: what is damaged is noted there, and left out; NULL: it fails */
	bool keeps_lost;               /* it is noted, and not left out */
	uint32_t *ranks;               /* of a rank-local one: those that have metadata, in order; sd is their union */
	uint64_t rank_count;
};

/* The format of the checkpoint at `name`; FORMAT_NONE: nothing is there, or something else. A folder of checkpoints is none because of a
 * .safetensors file in it, though who names it reads that (checkpoint_open). */
FALLIBLE enum err checkpoint_recognise(const struct store *store, const char *name, enum format *out);
/* The same of a file of a directory. Its contents count more than its name. */
FALLIBLE enum err checkpoint_recognise_file(struct store_at dir, const char *name, enum format *out);
FALLIBLE enum err checkpoint_format_of_dir(struct store_at dir, enum format *out);
/* The name of the checkpoint that `name` stands for: `name` itself, or, if that is a folder of no format in which training left its steps
 * (DeepSpeed: a file `latest`, folders global_stepN), the step that `latest` names; without such a file, the last one. `format` is that of
 * the one that is named. ERR_CHECKPOINT_INCOMPLETE: the step is not there. */
FALLIBLE enum err checkpoint_follow(const struct store *store, const char *name, char out[CHECKPOINT_NAME_MAX], enum format *format);
/* The directory that its files are in; *file_out: the last part of `name` if that is a file, which is all of it then; else NULL. */
FALLIBLE enum err checkpoint_open_dir(const struct store *store, const char *name, struct store_at *out, const char **file_out);
/* Opens and parses. ERR_NOT_FOUND, ERR_NOT_A_CHECKPOINT, ERR_CHECKPOINT_INCOMPLETE (a file that metadata names is missing or too short),
 * ERR_CHECKPOINT_DAMAGED (manifest or metadata are not what was written), ERR_FORMAT_…. ref: {"storage","name"}. */
FALLIBLE enum err checkpoint_open(const struct stores *stores, const struct ref *ref, struct checkpoint **out);
/* The same for verify, where `checked` is not NULL: notes items that are lost with their files, and goes on; and for a repair, with what it
 * knows better than the files, unless that is NULL. */
FALLIBLE enum err checkpoint_open_instead(const struct stores *stores, const struct ref *ref, const struct checkpoint_instead *instead,
					  struct checked *checked, struct checkpoint **out);
/* Notes the error in err_last() and leaves the item out (its length becomes 0, unless keeps_lost), if verify reads the checkpoint and the
 * error tells of damage; else returns the error. */
FALLIBLE enum err checkpoint_lose(struct checkpoint *c, struct sd_loc *loc, enum checked_part part, enum err e);
void checkpoint_free(struct checkpoint *c);
struct checkpoint *checkpoint_share(struct checkpoint *c);   /* the same one, to be freed once more */
void checkpoint_free_ptr(struct checkpoint **c);

/* ERR_FORMAT_UNSUPPORTED: its tensors are not those of a state dict; it is a delta, which has none without its base. */
FALLIBLE enum err checkpoint_check_whole(const struct checkpoint *c);

/* Counts what nothing vouches for (metadata without a digest) and warns of an outdated manifest. several: other checkpoints are read too,
 * so that files are named with this one. */
void checkpoint_note(const struct checkpoint *c, bool several, struct checked *checked);

/* From now on a rank-local checkpoint is what its i-th rank wrote, all of it: the union has each box once, whoever wrote it too. */
FALLIBLE enum err checkpoint_take_rank(struct checkpoint *c, uint64_t i);

/* Opens a file of c->sd for reading. Errors name the file. */
FALLIBLE enum err checkpoint_open_file(const struct checkpoint *c, uint32_t file, struct store_at *out);

/* Only the manifest (MANIFEST_NAME, or a rank's), NULL if there is none. */
FALLIBLE enum err checkpoint_manifest(struct store_at dir, const char *name, struct manifest **out);
