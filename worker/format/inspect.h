/* inspect.h: the pickles in a file, whatever holds them, and what loading them would run.
 *
 * Looked into are: pickles, one or several in a row (torch.save before 1.6 writes five); zip archives (torch.save, torch.jit, NumPy's .npz)
 * with every record in them, however it is called; NumPy's files of objects; and bytes objects in pickles that are one of these again.
 * A file may be several of them at once: which one is read depends on who opens it, so all are. Nothing is run.
 *
 *     struct inspect in = { 0 };
 *     TRY(inspect_begin(&in));
 *     TRY(inspect_file(&in, &(struct inspect_file){ .name = STR("model.pt") }, &source)); …
 *     in.globals, in.broken, inspect_is_safe(&in)
 *     inspect_end(&in); */
#pragma once
#include "base/arena.h"
#include "base/map.h"
#include "base/vec.h"
#include "format/source.h"

enum { INSPECT_GLOBALS = 10000, INSPECT_BROKEN = 1000, INSPECT_NAME = 1024 };

struct inspect_place {
	struct str file, record, fqn;   /* of the record in an archive; of the item; either may be empty */
	uint64_t offset;               /* in the file; of a deflated record: in what it unpacks to */
};

/* A class or function that pickles name. Names longer than INSPECT_NAME are cut. */
struct inspect_global {
	struct str module, name;       /* both empty: what is called is no global */
	bool is_data, changed;         /* changed: a pickle sets attributes of it */
	uint64_t imports, calls;
	struct inspect_place first;
};

struct inspect_broken {
	struct inspect_place place;
	struct str why;
};

struct inspect {
	struct arena *arena;
	struct map index;              /* of globals, by module and name */
	struct vec(struct inspect_global) globals;     /* the first INSPECT_GLOBALS; in the order in which they were found */
	struct vec(struct inspect_broken) broken;      /* the first INSPECT_BROKEN pickles that could not be followed to their ends */
	uint64_t pickles, broken_count;
	bool runs;                     /* something would have run that is no data; it may not be listed */
	enum err (*tick)(void *user);  /* called now and then; its error ends the inspection */
	void *user;
};

FALLIBLE enum err inspect_begin(struct inspect *in);
void inspect_end(struct inspect *in);
/* Nothing but data would have been made, as far as each pickle could be followed, which is to its end. */
bool inspect_is_safe(const struct inspect *in);

struct inspect_file {
	struct str name, fqn;          /* fqn: of an item of a checkpoint; or empty */
	uint64_t offset;               /* where the source begins in the file */
	bool is_pickle;                /* it must be one, or an archive: by its name. Else it is looked into if it looks like one */
};
/* Errors are those of the source and of memory: what is wrong with the bytes is noted. */
FALLIBLE enum err inspect_file(struct inspect *in, const struct inspect_file *file, const struct item_source *src);
/* Notes that a file, or an item, could not be looked into: the error in err_last(), which is cleared. */
FALLIBLE enum err inspect_note_broken(struct inspect *in, const struct inspect_file *file);
/* Do files of this name hold pickles: .pt, .pth, .bin, .ckpt, .pkl, .metadata …? */
bool inspect_expects(struct str name);
