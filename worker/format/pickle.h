/* pickle.h: a pickle machine that builds a graph of typed nodes and executes nothing. It serves
 * `.metadata` and the data.pkl of torch.save archives.
 *
 *     struct pickle *pk CLEANUP(pickle_free_ptr) = NULL;
 *     TRY(pickle_parse(bytes, n, NULL, &pk));            `bytes` must stay as long as pk: strings point into them
 *     pnode root = pickle_root(pk);
 *     if (pickle_kind(pk, root) == PK_DICT) {
 *             struct pickle_iter it = pickle_iter(pk, root);
 *             pnode key, value;
 *             while (pickle_next(pk, &it, &key) && pickle_next(pk, &it, &value)) …
 *     }
 *
 * Protocols 0 to 5, all opcodes but INST, OBJ, EXT*, NEXT_BUFFER and READONLY_BUFFER
 * (ERR_FORMAT_PICKLE says opcode and offset). A stream's calls are never made: torch.Size,
 * OrderedDict, set, frozenset, complex, bytes and _codecs.encode(…, 'latin1') of plain arguments
 * become nodes of their kind, every other REDUCE or NEWOBJ a PK_OBJECT that remembers what it was
 * made of. Bytes after STOP are ignored, as Python does.
 *
 * The graph may be cyclic and nodes may be shared, so that a small stream can describe an endless
 * tree: whoever walks it keeps a depth limit (PICKLE_DEPTH_MAX) and a limit on what it makes of it.
 * Accessors given a node of another kind answer with nothing (false, 0, an empty str), so a chain
 * of them needs one check at its end.
 *
 * Memory: about 4 bytes a reference, 12 a string or number. A `.metadata` of PyTorch's or dcpd's takes as many bytes as the
 * stream; what a hostile stream describes could take 20 times as many (a byte `]` is an empty list), so that more than
 * PICKLE_MEMORY_MIN + n is refused (ERR_FORMAT_PICKLE); + 2 n without records, which leave less. A first pass finds out which memo
 * entries are ever fetched; only those are kept. */
#pragma once
#include "base/buf.h"
#include "base/err.h"
#include "base/str.h"

enum { PICKLE_DEPTH_MAX = 64 };
#define PICKLE_BYTES_MAX (1ull << 30)
#define PICKLE_MEMORY_MIN (64ull << 20)

typedef uint32_t pnode;                  /* a node of one struct pickle; 0: none */

enum pickle_kind {
	PK_ABSENT,                       /* pnode 0 */
	PK_NONE,
	PK_BOOL,
	PK_INT,                          /* fits int64 */
	PK_BIGINT,                       /* does not; see pickle_bigint */
	PK_FLOAT,
	PK_COMPLEX,
	PK_STR,                          /* UTF-8, lone surrogates as in 'surrogatepass'; Python 2 byte strings if ASCII */
	PK_BYTES,
	PK_BYTEARRAY,
	PK_TUPLE,
	PK_SIZE,                         /* torch.Size: a tuple */
	PK_LIST,
	PK_DICT,
	PK_ORDERED_DICT,
	PK_SET,
	PK_FROZENSET,
	PK_GLOBAL,                       /* module and name; a class, a dtype, a function */
	PK_PERSID,                       /* PERSID, BINPERSID: pickle_args is the id */
	PK_OBJECT,                       /* REDUCE or NEWOBJ of anything else: class, args, state, items */
	PK_RECORD,                       /* an instance of one of the caller's struct pickle_record */
};

/* Classes whose instances are kept in compact form: only the named attributes, set by BUILD with a dict; other attributes are
 * dropped. May be NULL. The table ends with a NULL name; at most PICKLE_FIELDS_MAX fields. */
enum { PICKLE_FIELDS_MAX = 8 };
struct pickle_record {
	const char *module, *name;
	uint32_t id;                     /* the caller's; several classes may share it (old and new module paths) */
	uint32_t field_count;
	const char *fields[PICKLE_FIELDS_MAX];
};

struct pickle;
FALLIBLE enum err pickle_parse(const void *bytes, uint64_t n, const struct pickle_record *records, struct pickle **out);
void pickle_free(struct pickle *pk);
void pickle_free_ptr(struct pickle **pk);
uint64_t pickle_memory(const struct pickle *pk);         /* bytes in use */
uint64_t pickle_consumed(const struct pickle *pk);       /* bytes up to and with STOP (old torch.save files hold several pickles) */

pnode pickle_root(const struct pickle *pk);
enum pickle_kind pickle_kind(const struct pickle *pk, pnode n);

bool pickle_is_true(const struct pickle *pk, pnode n);                   /* PK_BOOL True */
bool pickle_int(const struct pickle *pk, pnode n, int64_t *out);         /* PK_INT; a bool is none */
bool pickle_float(const struct pickle *pk, pnode n, double *out);        /* PK_FLOAT */
bool pickle_complex(const struct pickle *pk, pnode n, double *re, double *im);
struct str pickle_str(const struct pickle *pk, pnode n);                 /* PK_STR; not NUL-terminated */
struct str pickle_bytes(const struct pickle *pk, pnode n);               /* PK_BYTES, PK_BYTEARRAY */
/* PK_BIGINT: two's complement little-endian, or (protocol 0) decimal text with an optional sign. */
struct str pickle_bigint(const struct pickle *pk, pnode n, bool *decimal_out);

/* PK_TUPLE, PK_SIZE: pickle_at is cheap. Other containers: iterate; a dict gives key, value, key, value … and counts pairs.
 * PK_OBJECT: what APPEND or SETITEM put into it. */
uint64_t pickle_count(const struct pickle *pk, pnode n);
pnode pickle_at(const struct pickle *pk, pnode tuple, uint64_t i);
struct pickle_iter {
	uint32_t block, at;
};
struct pickle_iter pickle_iter(const struct pickle *pk, pnode n);
bool pickle_next(const struct pickle *pk, struct pickle_iter *it, pnode *item_out);
pnode pickle_dict_get(const struct pickle *pk, pnode dict, const char *key); /* the last of that key; linear */

/* PK_GLOBAL: its own names; PK_OBJECT: those of what was called. */
struct str pickle_module(const struct pickle *pk, pnode n);
struct str pickle_name(const struct pickle *pk, pnode n);
bool pickle_is_call(const struct pickle *pk, pnode n, const char *module, const char *name);   /* PK_OBJECT only */
pnode pickle_args(const struct pickle *pk, pnode n);     /* PK_OBJECT: the argument tuple; PK_PERSID: the id */
pnode pickle_state(const struct pickle *pk, pnode n);    /* PK_OBJECT: of the last BUILD, else 0 */

uint32_t pickle_record_id(const struct pickle *pk, pnode n);             /* PK_RECORD; else UINT32_MAX */
pnode pickle_field(const struct pickle *pk, pnode n, uint32_t i);        /* PK_RECORD; 0 if never set */

/* Appends a pickle (protocol 2) of the node alone, which Python loads as an equal object: what it would have called, with what. Shared
 * nodes are written each time they are met, so that the buffer's maximum ends what would not end by itself. ERR_FORMAT_PICKLE for what a
 * pickle by itself cannot say: persistent ids, keyword arguments of NEWOBJ_EX, more than PICKLE_DEPTH_MAX levels. */
FALLIBLE enum err pickle_put(const struct pickle *pk, pnode n, struct buf *b);
/* The same without PROTO and STOP: opcodes that leave the object on the stack. */
FALLIBLE enum err pickle_put_part(const struct pickle *pk, pnode n, struct buf *b);
void pickle_put_str(struct buf *b, struct str s);        /* at most 4 GiB */
void pickle_put_int(struct buf *b, int64_t v);

/* "int", "dict", "numpy.ndarray": the class for messages and for opaque values; what copyreg and numpy rebuild functions make is
 * named by their first argument. Cut to fit; returns into. */
const char *pickle_class_name(const struct pickle *pk, pnode n, char *into, size_t max);

/* Deeds that loading a stream would do: find a class or function (which imports its module), call it, or set attributes of the class
 * itself. */
enum pickle_deed { PICKLE_IMPORT, PICKLE_CALL, PICKLE_CHANGE };
struct pickle_watch {
	void *user;
	/* at: the opcode's offset. Both names are empty if what is called is no global: the result of another call, for instance. They are
	 * good during the call only. An error ends the inspection. */
	enum err (*deed)(void *user, enum pickle_deed deed, struct str module, struct str name, uint64_t at);
	/* A bytes object, which may be a pickle itself; at: of its first byte. NULL: not told. */
	enum err (*bytes)(void *user, const unsigned char *p, uint64_t n, uint64_t at);
};
/* Follows a stream as Python would, opcodes included that pickle_parse refuses, and tells what it would do. ERR_FORMAT_PICKLE: it could
 * not be followed to its STOP (Python might not either); what it does up to there was told, and what globals are named behind that, too.
 * *consumed_out: as pickle_consumed, set without an error. */
FALLIBLE enum err pickle_inspect(const void *bytes, uint64_t n, const struct pickle_watch *watch, uint64_t *consumed_out);
/* A global that is data, or makes data of data, by PyTorch's, NumPy's or Python's own account: to name or call it runs nobody's code. */
bool pickle_is_data(struct str module, struct str name);

/* UTF-8 as Python's 'surrogatepass' has it: lone surrogates are allowed. */
bool pickle_utf8(struct str s);
