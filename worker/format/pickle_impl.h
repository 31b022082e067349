/* pickle_impl.h: what the files of the pickle machine share; nobody else includes it.
 *
 * Nodes live in one array of 32-bit cells; a pnode is an index into it, or one of a few constants,
 * or (top bit set) a small int itself.
 *
 *     STR BYTES BIGINT   head  offset  length        offset: into the input, or with TEXT_BIT into `text`
 *     INT FLOAT          head  low  high             COMPLEX: two of them
 *     TUPLE SIZE         head(count)  item …
 *     LIST DICT SET …    head  count  first  last    → block: next  n  item …
 *     GLOBAL             head(known)  module  name
 *     OBJECT             head(opcode)  callable  args  state  items
 *     RECORD             head(index of the class)  field …
 *
 * A pnode has one owner (a stack slot, a container, a field) unless its SHARED bit is set: DUP and
 * the memo set it. A node with one owner at the end of the array is given back when it is consumed, which keeps a chunk small. */
#pragma once
#include "format/pickle.h"

#include "base/reader.h"

enum {
	N_NONE = 1,
	N_FALSE,
	N_TRUE,
	N_EMPTY_TUPLE,
	N_FRESH_DICT,              /* on the stack only: an EMPTY_DICT nobody looked at yet */
	N_FIRST = 8,               /* the first real cell */
};
#define N_SMALL 0x80000000u        /* a small int: the other 31 bits, signed */
#define TEXT_BIT 0x80000000u

enum { HEAD_KIND = 31, HEAD_SHARED = 32, HEAD_SHIFT = 6 };
#define HEAD_ARG_MAX ((1u << 26) - 1)
enum { REDUCE = 'R', NEWOBJ = 0x81 };      /* opcodes that make an OBJECT; the third, NEWOBJ_EX, has arguments that are not kept */
enum { LIST_CELLS = 4, BLOCK_HEAD = 2, OBJECT_CELLS = 5, STR_CELLS = 3 };
enum { LIST_COUNT = 1, LIST_FIRST, LIST_LAST };
enum { OBJECT_CALLEE = 1, OBJECT_ARGS, OBJECT_STATE, OBJECT_ITEMS };

/* Globals that the machine itself understands; from KNOWN_RECORD on: the caller's classes. */
enum known {
	KNOWN_NOTHING,
	KNOWN_SIZE,
	KNOWN_ORDERED_DICT,
	KNOWN_SET,
	KNOWN_FROZENSET,
	KNOWN_COMPLEX,
	KNOWN_BYTES,
	KNOWN_BYTEARRAY,
	KNOWN_ENCODE,
	KNOWN_RECONSTRUCTOR,
	KNOWN_OBJECT,
	KNOWN_GETATTR,
	KNOWN_RECORD = 16,
};

/* Memo entries that the stream fetches anywhere, and their values. */
struct memo {
	uint64_t *used;
	uint32_t *before;          /* used bits in the words before */
	uint32_t *values;          /* one per used bit */
	uint64_t words, value_count;
};

struct cells {
	uint32_t *p;
	uint32_t count, cap;
};

enum { FIELDS_CACHED = 64, MEMO_NEAR = 256 };

struct pickle {
	struct reader in;
	struct cells cells, stack, marks;
	uint64_t memory_max;       /* of cells, stack, marks, memo and text together */
	struct buf text;           /* strings that had to be decoded */
	const struct pickle_record *records;
	struct memo memo;
	pnode near[MEMO_NEAR];     /* the values of the first entries once more */
	uint64_t memo_count;       /* the id that MEMOIZE takes next */
	bool memo_gaps;            /* PUT left some out */
	uint64_t op_at;
	struct {
		pnode key;
		uint32_t record;
		int field;
	} fields[FIELDS_CACHED];              /* what attribute names lately meant */
	bool stopped;
	pnode root;
	const struct pickle_watch *watch;     /* NULL: nobody is told, and opcodes that no checkpoint has are refused */
};

/* One opcode with its argument. */
struct pickle_op {
	unsigned char code;
	uint64_t number;           /* fixed-size argument, little-endian */
	const unsigned char *data; /* counted bytes, or the line without its newline */
	uint64_t len;
	const unsigned char *data2;
	uint64_t len2;             /* GLOBAL's second line */
};

/* ERR_FORMAT_PICKLE with the offset of the current opcode. */
FALLIBLE enum err pickle_bad(const struct pickle *pk, const char *place, const char *fmt, ...) PRINTF_LIKE(3, 4);
#define BAD(pk, ...) pickle_bad((pk), ERR_PLACE, __VA_ARGS__)

/* pickle_scan.c */
enum { OP_FIXED = 0x40 };
extern const unsigned char pickle_op_args[256];              /* OP_FIXED + bytes of argument, or how to read it */
FALLIBLE enum err pickle_op_slow(struct pickle *pk, struct pickle_op *op);
/* Nearly all opcodes have an argument of 0 to 8 bytes and are not the last of the stream. */
static inline FALLIBLE enum err pickle_op_next(struct pickle *pk, struct pickle_op *op)
{
	if (reader_left(&pk->in) < 1 + sizeof(uint64_t))
		return pickle_op_slow(pk, op);
	const unsigned char *p = pk->in.p + pk->in.at;
	unsigned bytes = pickle_op_args[*p] - (unsigned)OP_FIXED;
	if (bytes > sizeof(uint64_t))
		return pickle_op_slow(pk, op);
	uint64_t v;
	memcpy(&v, p + 1, sizeof v);
	op->code = *p;
	op->number = bytes ? le64toh(v) & UINT64_MAX >> (64 - 8 * bytes) : 0;
	pk->op_at = pk->in.at;
	pk->in.at += 1 + bytes;
	return OK;
}
/* The memo entry that a PUT or GET names. */
FALLIBLE enum err pickle_op_id_slow(struct pickle *pk, const struct pickle_op *op, uint64_t *id_out);
static inline FALLIBLE enum err pickle_op_id(struct pickle *pk, const struct pickle_op *op, uint64_t *id_out)
{
	if (op->code == 'g' || op->code == 'p' || op->number > pk->in.n)
		return pickle_op_id_slow(pk, op, id_out);
	*id_out = op->number;
	return OK;
}
FALLIBLE enum err pickle_scan(struct pickle *pk);
/* The place of a memo entry; NULL if it is never fetched. */
static inline uint32_t *pickle_memo_slot(struct pickle *pk, uint64_t id)
{
	const struct memo *memo = &pk->memo;
	uint64_t word = id >> 6, bit = 1ull << (id & 63);

	if (word >= memo->words || !(memo->used[word] & bit))
		return NULL;
	/* Counts ones by hand: without the popcnt instruction, which not every x86-64 has, the builtin is a call. */
	uint64_t v = memo->used[word] & (bit - 1);
	v -= v >> 1 & 0x5555555555555555;
	v = (v & 0x3333333333333333) + (v >> 2 & 0x3333333333333333);
	v = (v + (v >> 4)) & 0x0f0f0f0f0f0f0f0f;
	return &memo->values[memo->before[word] + (uint32_t)(v * 0x0101010101010101 >> 56)];
}
void pickle_memo_free(struct memo *memo);

/* pickle_node.c */
static inline uint32_t node_head(const struct pickle *pk, pnode n) { return pk->cells.p[n]; }
static inline bool node_is_cell(pnode n) { return n >= N_FIRST && !(n & N_SMALL); }
static inline bool node_shared(const struct pickle *pk, pnode n)
{
	return node_is_cell(n) && (pk->cells.p[n] & HEAD_SHARED);
}
static inline void node_share(struct pickle *pk, pnode n)
{
	if (node_is_cell(n))
		pk->cells.p[n] |= HEAD_SHARED;
}
/* FORMAT_PICKLE beyond memory_max. */
FALLIBLE enum err node_room(struct pickle *pk, struct cells *c, uint64_t more);
static inline FALLIBLE enum err cells_push(struct pickle *pk, struct cells *c, uint32_t value)
{
	if (c->count == c->cap)
		TRY(node_room(pk, c, 1));
	c->p[c->count++] = value;
	return OK;
}
FALLIBLE enum err node_new(struct pickle *pk, enum pickle_kind kind, uint32_t arg, uint32_t cells, pnode *out);
FALLIBLE enum err node_int(struct pickle *pk, int64_t v, pnode *out);
FALLIBLE enum err node_double(struct pickle *pk, double v, pnode *out);
FALLIBLE enum err node_ref(struct pickle *pk, enum pickle_kind kind, const unsigned char *p, uint64_t n, pnode *out);
FALLIBLE enum err node_text(struct pickle *pk, enum pickle_kind kind, uint64_t from, pnode *out); /* text.p[from..] */
FALLIBLE enum err node_tuple(struct pickle *pk, enum pickle_kind kind, const pnode *items, uint64_t n, pnode *out);
FALLIBLE enum err node_list(struct pickle *pk, enum pickle_kind kind, pnode *out);
/* Appends; `items` must not point into the cells. */
FALLIBLE enum err node_extend(struct pickle *pk, pnode list, const pnode *items, uint64_t n);
/* Gives back a tuple, or list or dict with one block, that has one owner and lies at the end; its items stay. */
void node_release(struct pickle *pk, pnode n);

/* pickle_text.c: protocol 0 */
FALLIBLE enum err text_int(struct pickle *pk, const struct pickle_op *op, pnode *out);
FALLIBLE enum err text_float(struct pickle *pk, const struct pickle_op *op, pnode *out);
FALLIBLE enum err text_string(struct pickle *pk, const struct pickle_op *op, pnode *out);
FALLIBLE enum err text_unicode(struct pickle *pk, const struct pickle_op *op, pnode *out);
FALLIBLE enum err text_latin1(struct pickle *pk, enum pickle_kind kind, pnode utf8, pnode *out);

/* pickle_watch.c */
FALLIBLE enum err watch_global(struct pickle *pk, pnode global);
FALLIBLE enum err watch_call(struct pickle *pk, pnode callee, pnode args);
FALLIBLE enum err watch_held(struct pickle *pk, uint32_t from);       /* the stack's slots from there on become part of something */
FALLIBLE enum err watch_change(struct pickle *pk, pnode global);
FALLIBLE enum err watch_extension(struct pickle *pk, uint64_t number);
FALLIBLE enum err watch_bytes(struct pickle *pk, const struct pickle_op *op);
/* pickle.c: the machine, ready to run. */
FALLIBLE enum err pickle_begin(struct pickle *pk, const void *bytes, uint64_t n);
FALLIBLE enum err pickle_run(struct pickle *pk);

/* pickle_call.c */
enum known call_known(const struct pickle *pk, struct str module, struct str name);
enum known call_known_of(const struct pickle *pk, pnode n);     /* of a PK_GLOBAL */
FALLIBLE enum err call_make(struct pickle *pk, pnode callee, pnode args, pnode *out);   /* REDUCE, NEWOBJ */
FALLIBLE enum err call_build(struct pickle *pk, pnode inst, pnode state);               /* BUILD */
