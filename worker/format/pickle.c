/* pickle.c: the stack machine. Every opcode is a small function in a table; no recursion, nothing
 * is called or imported. See pickle.h for what it makes, pickle_impl.h for how nodes look. */
#include "format/pickle_impl.h"

#include <stdarg.h>
#include <stdio.h>

#include "base/mem.h"

enum err pickle_bad(const struct pickle *pk, const char *place, const char *fmt, ...)
{
	char text[256];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof text, fmt, ap);
	va_end(ap);
	err_record(ERR_FORMAT_PICKLE, 0, place, "%s, at byte %ju of the pickle", text, (uintmax_t)pk->op_at);
	return err_at_file(ERR_FORMAT_PICKLE, "", (int64_t)pk->op_at);
}

typedef enum err op_fn(struct pickle *pk, const struct pickle_op *op);

/* The lowest stack slot that belongs to what came after the latest MARK. */
static uint32_t fence(const struct pickle *pk)
{
	return pk->marks.count ? pk->marks.p[pk->marks.count - 1] : 0;
}

static FALLIBLE enum err need(const struct pickle *pk, uint32_t n)
{
	if (pk->stack.count - fence(pk) < n)
		return BAD(pk, "too few values on the stack");
	return OK;
}

static inline enum err push(struct pickle *pk, pnode n)
{
	return cells_push(pk, &pk->stack, n);
}

/* Gives the dicts among the top slots a node, now that something will hold or look at them. */
static inline FALLIBLE enum err settle(struct pickle *pk, uint32_t from)
{
	for (uint32_t i = from; i < pk->stack.count; i++)
		if (pk->stack.p[i] == N_FRESH_DICT) {
			pnode dict;
			TRY(node_list(pk, PK_DICT, &dict));
			pk->stack.p[i] = dict;
		}
	return OK;
}

/* Checks for n values and settles them; *at_out is the first one's slot. */
static FALLIBLE enum err top(struct pickle *pk, uint32_t n, uint32_t *at_out)
{
	TRY(need(pk, n));
	*at_out = pk->stack.count - n;
	return settle(pk, *at_out);
}

static FALLIBLE enum err pop_mark(struct pickle *pk, uint32_t *at_out)
{
	if (pk->marks.count == 0)
		return BAD(pk, "no MARK on the stack");
	*at_out = pk->marks.p[--pk->marks.count];
	return settle(pk, *at_out);
}

static enum err op_nothing(struct pickle *pk, const struct pickle_op *op)
{
	if (op->code == 0x80 && op->number > 5)
		return BAD(pk, "pickle protocol %ju", (uintmax_t)op->number);
	if (op->code == 0x95 && op->number > reader_left(&pk->in))
		return BAD(pk, "a frame of %ju bytes, %ju left", (uintmax_t)op->number, (uintmax_t)reader_left(&pk->in));
	return OK;
}

static enum err op_constant(struct pickle *pk, const struct pickle_op *op)
{
	switch (op->code) {
	case 'N': return push(pk, N_NONE);
	case 0x88: return push(pk, N_TRUE);
	case 0x89: return push(pk, N_FALSE);
	case ')': return push(pk, N_EMPTY_TUPLE);
	default: return push(pk, N_FRESH_DICT);
	}
}

static enum err op_int(struct pickle *pk, const struct pickle_op *op)
{
	pnode n;

	TRY(node_int(pk, op->code == 'J' ? (int32_t)(uint32_t)op->number : (int64_t)op->number, &n));
	return push(pk, n);
}

static enum err op_long(struct pickle *pk, const struct pickle_op *op)
{
	uint64_t v = 0;
	pnode n;

	if (op->len > sizeof v) {
		TRY(node_ref(pk, PK_BIGINT, op->data, op->len, &n));
		return push(pk, n);
	}
	if (op->len && op->data[op->len - 1] & 0x80)
		v = UINT64_MAX;
	for (uint64_t i = op->len; i-- > 0;)
		v = v << 8 | op->data[i];
	TRY(node_int(pk, (int64_t)v, &n));
	return push(pk, n);
}

static enum err op_binfloat(struct pickle *pk, const struct pickle_op *op)
{
	uint64_t bits = __builtin_bswap64(op->number);
	double v;
	pnode n;

	memcpy(&v, &bits, sizeof v);
	TRY(node_double(pk, v, &n));
	return push(pk, n);
}

static enum err op_text(struct pickle *pk, const struct pickle_op *op)
{
	pnode n;

	if (op->code == 'F')
		TRY(text_float(pk, op, &n));
	else if (op->code == 'V')
		TRY(text_unicode(pk, op, &n));
	else if (op->code == 'I' || op->code == 'L')
		TRY(text_int(pk, op, &n));
	else
		TRY(text_string(pk, op, &n));
	return push(pk, n);
}

static enum err op_unicode(struct pickle *pk, const struct pickle_op *op)
{
	pnode n;

	if (!pickle_utf8((struct str){ (const char *)op->data, op->len }))
		return BAD(pk, "a string that is not UTF-8");
	TRY(node_ref(pk, PK_STR, op->data, op->len, &n));
	return push(pk, n);
}

static enum err op_bytes(struct pickle *pk, const struct pickle_op *op)
{
	pnode n;

	TRY(node_ref(pk, op->code == 0x96 ? PK_BYTEARRAY : PK_BYTES, op->data, op->len, &n));
	if (pk->watch)
		TRY(watch_bytes(pk, op));
	return push(pk, n);
}

static FALLIBLE enum err make_global(struct pickle *pk, pnode module, pnode name, pnode *out)
{
	enum known known = call_known(pk, pickle_str(pk, module), pickle_str(pk, name));

	TRY(node_new(pk, PK_GLOBAL, (uint32_t)known, 3, out));
	pk->cells.p[*out + 1] = module;
	pk->cells.p[*out + 2] = name;
	return pk->watch ? watch_global(pk, *out) : OK;
}

static FALLIBLE enum err push_global(struct pickle *pk, pnode module, pnode name)
{
	pnode n;

	TRY(make_global(pk, module, name, &n));
	return push(pk, n);
}

static bool is_name(const unsigned char *p, uint64_t n)
{
	return pickle_utf8((struct str){ (const char *)p, n });
}

/* The names that GLOBAL and INST spell out. */
static FALLIBLE enum err spelled_names(struct pickle *pk, const struct pickle_op *op, pnode *module, pnode *name)
{
	if (!is_name(op->data, op->len) || !is_name(op->data2, op->len2))
		return BAD(pk, "a name that is not UTF-8");
	TRY(node_ref(pk, PK_STR, op->data, op->len, module));
	return node_ref(pk, PK_STR, op->data2, op->len2, name);
}

static enum err op_global(struct pickle *pk, const struct pickle_op *op)
{
	pnode module, name;

	TRY(spelled_names(pk, op, &module, &name));
	return push_global(pk, module, name);
}

static enum err op_stack_global(struct pickle *pk, const struct pickle_op *)
{
	uint32_t at;

	TRY(top(pk, 2, &at));
	pnode module = pk->stack.p[at], name = pk->stack.p[at + 1];
	if (pickle_kind(pk, module) != PK_STR || pickle_kind(pk, name) != PK_STR)
		return BAD(pk, "the name of a class or function is no string");
	pk->stack.count = at;
	return push_global(pk, module, name);
}

static enum err op_stack(struct pickle *pk, const struct pickle_op *op)
{
	uint32_t at;

	switch (op->code) {
	case '(': return cells_push(pk, &pk->marks, pk->stack.count);
	case '1': /* POP_MARK */
		TRY(pop_mark(pk, &at));
		pk->stack.count = at;
		return OK;
	case '0': /* POP takes a MARK if that is what is on top */
		if (pk->marks.count && fence(pk) == pk->stack.count) {
			pk->marks.count--;
			return OK;
		}
		TRY(need(pk, 1));
		pk->stack.count--;
		return OK;
	case '2': /* DUP */
		TRY(top(pk, 1, &at));
		node_share(pk, pk->stack.p[at]);
		return push(pk, pk->stack.p[at]);
	default: /* STOP */
		TRY(top(pk, 1, &at));
		if (pk->watch)
			TRY(watch_held(pk, at));
		pk->root = pk->stack.p[at];
		pk->stopped = true;
		return OK;
	}
}

static FALLIBLE enum err replace(struct pickle *pk, uint32_t at, pnode n)
{
	pk->stack.count = at;
	return push(pk, n);
}

static enum err op_tuple(struct pickle *pk, const struct pickle_op *op)
{
	uint32_t at;
	pnode n;

	if (op->code == 't')
		TRY(pop_mark(pk, &at));
	else
		TRY(top(pk, op->code - 0x84u, &at));
	if (pk->watch)
		TRY(watch_held(pk, at));
	TRY(node_tuple(pk, PK_TUPLE, pk->stack.p + at, pk->stack.count - at, &n));
	return replace(pk, at, n);
}

static enum err op_new_container(struct pickle *pk, const struct pickle_op *op)
{
	pnode n;

	TRY(node_list(pk, op->code == ']' ? PK_LIST : PK_SET, &n));
	return push(pk, n);
}

/* LIST, DICT, FROZENSET: made of what is above the mark. */
static enum err op_from_mark(struct pickle *pk, const struct pickle_op *op)
{
	uint32_t at = 0;
	pnode n;

	TRY(pop_mark(pk, &at));
	if (op->code == 'd' && (pk->stack.count - at) % 2)
		return BAD(pk, "a key without its value");
	if (pk->watch)
		TRY(watch_held(pk, at));
	TRY(node_list(pk, op->code == 'l' ? PK_LIST : op->code == 'd' ? PK_DICT : PK_FROZENSET, &n));
	TRY(node_extend(pk, n, pk->stack.p + at, pk->stack.count - at));
	return replace(pk, at, n);
}

/* The list that items go to: the target itself, or that of an object whose class is not known. */
static FALLIBLE enum err target_of(struct pickle *pk, uint32_t slot, bool pairs, bool set, pnode *out)
{
	enum pickle_kind kind = pickle_kind(pk, pk->stack.p[slot]), want = pairs ? PK_DICT : PK_LIST;
	char name[64];

	*out = pk->stack.p[slot];
	if (pairs ? kind == PK_DICT || kind == PK_ORDERED_DICT : kind == (set ? PK_SET : PK_LIST))
		return OK;
	if (kind != PK_OBJECT)
		return BAD(pk, "items for a %s", pickle_class_name(pk, *out, name, sizeof name));
	pnode items = pk->cells.p[*out + OBJECT_ITEMS];
	if (!items) {
		pnode object = *out;
		TRY(node_list(pk, want, &items));
		pk->cells.p[object + OBJECT_ITEMS] = items;
	} else if (pickle_kind(pk, items) != want) {
		return BAD(pk, "an object with both elements and keys");
	}
	*out = items;
	return OK;
}

static FALLIBLE enum err add_items(struct pickle *pk, uint32_t at, bool pairs, bool set)
{
	uint32_t n = pk->stack.count - at;
	pnode list;

	if (at == fence(pk))
		return BAD(pk, "too few values on the stack");
	if (pairs && n % 2)
		return BAD(pk, "a key without its value");
	TRY(settle(pk, at - 1));
	if (pk->watch)
		TRY(watch_held(pk, at));
	TRY(target_of(pk, at - 1, pairs, set, &list));
	TRY(node_extend(pk, list, pk->stack.p + at, n));
	pk->stack.count = at;
	return OK;
}

static enum err op_add_one(struct pickle *pk, const struct pickle_op *op)
{
	uint32_t n = op->code == 's' ? 2 : 1;
	uint32_t at;

	TRY(need(pk, n + 1));
	TRY(top(pk, n, &at));
	return add_items(pk, at, op->code == 's', false);
}

static enum err op_add_marked(struct pickle *pk, const struct pickle_op *op)
{
	uint32_t at = 0;

	TRY(pop_mark(pk, &at));
	return add_items(pk, at, op->code == 'u', op->code == 0x90);
}

static FALLIBLE enum err remember(struct pickle *pk, uint64_t id)
{
	uint32_t at, *slot = pickle_memo_slot(pk, id);

	TRY(need(pk, 1));
	if (!slot)
		return OK;
	TRY(top(pk, 1, &at));
	node_share(pk, pk->stack.p[at]);
	*slot = pk->stack.p[at];
	if (id < MEMO_NEAR)
		pk->near[id] = pk->stack.p[at];
	return OK;
}

/* MEMOIZE numbers entries by how many there are, which is the next number as long as PUT did not leave gaps. */
static enum err op_put(struct pickle *pk, const struct pickle_op *op)
{
	uint64_t id = pk->memo_count;

	if (op->code != 0x94) {
		TRY(pickle_op_id(pk, op, &id));
		if (id > pk->memo_count)
			pk->memo_gaps = true;
	} else if (pk->memo_gaps) {
		return BAD(pk, "MEMOIZE after memo entries with gaps");
	}
	if (id == pk->memo_count)
		pk->memo_count++;
	return remember(pk, id);
}

/* Entries of one byte are what is fetched most: class and attribute names. */
static enum err op_get_near(struct pickle *pk, const struct pickle_op *op)
{
	pnode n = pk->near[op->number];

	if (!n)
		return BAD(pk, "memo entry %ju was never set", (uintmax_t)op->number);
	return push(pk, n);
}

static enum err op_get(struct pickle *pk, const struct pickle_op *op)
{
	uint64_t id;

	TRY(pickle_op_id(pk, op, &id));
	const uint32_t *slot = pickle_memo_slot(pk, id);
	if (!slot || !*slot)
		return BAD(pk, "memo entry %ju was never set", (uintmax_t)id);
	return push(pk, *slot);
}

/* REDUCE, NEWOBJ: callee, args; NEWOBJ_EX: keyword arguments too, which nothing here looks at. */
static enum err op_call(struct pickle *pk, const struct pickle_op *op)
{
	uint32_t at;
	pnode n;

	TRY(top(pk, op->code == 0x92 ? 3 : 2, &at));
	if (pk->watch)
		TRY(watch_call(pk, pk->stack.p[at], pk->stack.p[at + 1]));
	TRY(call_make(pk, pk->stack.p[at], pk->stack.p[at + 1], &n));
	if (pickle_kind(pk, n) == PK_OBJECT && node_head(pk, n) >> HEAD_SHIFT == 0)
		pk->cells.p[n] |= (uint32_t)op->code << HEAD_SHIFT;
	return replace(pk, at, n);
}

/* INST, OBJ: the class is spelled out, or stands above the mark; what follows are its arguments. */
static enum err op_instance(struct pickle *pk, const struct pickle_op *op)
{
	uint32_t at = 0, first;
	pnode callee, args, module, name, n;

	TRY(pop_mark(pk, &at));
	first = at;
	if (op->code == 'i') {
		TRY(spelled_names(pk, op, &module, &name));
		TRY(make_global(pk, module, name, &callee));
	} else {
		TRY(need(pk, 1));
		callee = pk->stack.p[first++];
	}
	TRY(node_tuple(pk, PK_TUPLE, pk->stack.p + first, pk->stack.count - first, &args));
	TRY(watch_held(pk, first));
	TRY(watch_call(pk, callee, args));
	TRY(call_make(pk, callee, args, &n));
	return replace(pk, at, n);
}

/* EXT: an object that the process has registered under a number. Its name is not in the stream. */
static enum err op_extension(struct pickle *pk, const struct pickle_op *op)
{
	pnode none, n;

	TRY(watch_extension(pk, op->number));
	TRY(node_ref(pk, PK_STR, pk->in.p, 0, &none));
	TRY(node_new(pk, PK_GLOBAL, KNOWN_NOTHING, 3, &n));
	pk->cells.p[n + 1] = pk->cells.p[n + 2] = none;
	return push(pk, n);
}

/* NEXT_BUFFER: bytes that lie elsewhere. READONLY_BUFFER leaves them what they are. */
static enum err op_buffer(struct pickle *pk, const struct pickle_op *op)
{
	return op->code == 0x97 ? push(pk, N_NONE) : need(pk, 1);
}

static enum err op_build(struct pickle *pk, const struct pickle_op *)
{
	TRY(need(pk, 2));
	uint32_t at = pk->stack.count - 2;
	pnode state = pk->stack.p[at + 1];
	if (state == N_FRESH_DICT && pickle_kind(pk, pk->stack.p[at]) == PK_RECORD) {
		pk->stack.count = at + 1;
		return OK;
	}
	TRY(settle(pk, at));
	if (pk->watch)
		TRY(watch_held(pk, at + 1));
	if (pk->watch && pickle_kind(pk, pk->stack.p[at]) == PK_GLOBAL)
		TRY(watch_change(pk, pk->stack.p[at]));
	else
		TRY(call_build(pk, pk->stack.p[at], pk->stack.p[at + 1]));
	pk->stack.count = at + 1;
	return OK;
}

static enum err op_persid(struct pickle *pk, const struct pickle_op *op)
{
	uint32_t at = pk->stack.count;
	pnode id, n;

	if (op->code == 'P') {
		if (!is_name(op->data, op->len))
			return BAD(pk, "a persistent id that is not UTF-8");
		TRY(node_ref(pk, PK_STR, op->data, op->len, &id));
	} else {
		TRY(top(pk, 1, &at));
		id = pk->stack.p[at];
	}
	TRY(node_new(pk, PK_PERSID, 0, 2, &n));
	pk->cells.p[n + 1] = id;
	return replace(pk, at, n);
}

static op_fn *const ops[256] = {
	[0x80] = op_nothing, [0x95] = op_nothing,
	['N'] = op_constant, [0x88] = op_constant, [0x89] = op_constant, [')'] = op_constant, ['}'] = op_constant,
	['K'] = op_int, ['M'] = op_int, ['J'] = op_int, [0x8a] = op_long, [0x8b] = op_long, ['G'] = op_binfloat,
	['I'] = op_text, ['L'] = op_text, ['F'] = op_text, ['S'] = op_text, ['T'] = op_text, ['U'] = op_text, ['V'] = op_text,
	['X'] = op_unicode, [0x8c] = op_unicode, [0x8d] = op_unicode,
	['B'] = op_bytes, ['C'] = op_bytes, [0x8e] = op_bytes, [0x96] = op_bytes,
	['c'] = op_global, [0x93] = op_stack_global,
	['('] = op_stack, ['0'] = op_stack, ['1'] = op_stack, ['2'] = op_stack, ['.'] = op_stack,
	['t'] = op_tuple, [0x85] = op_tuple, [0x86] = op_tuple, [0x87] = op_tuple,
	[']'] = op_new_container, [0x8f] = op_new_container, ['l'] = op_from_mark, ['d'] = op_from_mark, [0x91] = op_from_mark,
	['a'] = op_add_one, ['s'] = op_add_one, ['e'] = op_add_marked, ['u'] = op_add_marked, [0x90] = op_add_marked,
	['p'] = op_put, ['q'] = op_put, ['r'] = op_put, [0x94] = op_put, ['g'] = op_get, ['h'] = op_get_near, ['j'] = op_get,
	['R'] = op_call, [0x81] = op_call, [0x92] = op_call, ['b'] = op_build, ['P'] = op_persid, ['Q'] = op_persid,
	['i'] = op_instance, ['o'] = op_instance, [0x82] = op_extension, [0x83] = op_extension, [0x84] = op_extension,
	[0x97] = op_buffer, [0x98] = op_buffer,
};

enum err pickle_run(struct pickle *pk)
{
	struct pickle_op op = { 0 };

	while (!pk->stopped) {
		TRY(pickle_op_next(pk, &op));
		must(ops[op.code] != NULL); /* pickle_op_next refuses what is not in both tables */
		TRY(ops[op.code](pk, &op));
	}
	return OK;
}

enum err pickle_begin(struct pickle *pk, const void *bytes, uint64_t n)
{
	if (n > PICKLE_BYTES_MAX)
		return ERR(LIMIT_EXCEEDED, "a pickle of %ju bytes", (uintmax_t)n);
	pk->in = reader_of(bytes, n);
	pk->memory_max = PICKLE_MEMORY_MIN + (pk->records ? n : 2 * n);
	TRY(pickle_scan(pk));
	for (uint32_t i = 0; i < N_FIRST; i++)
		TRY(cells_push(pk, &pk->cells, 0));
	TRY(cells_push(pk, &pk->stack, 0)); /* so that its array is there */
	pk->stack.count = 0;
	return OK;
}

enum err pickle_parse(const void *bytes, uint64_t n, const struct pickle_record *records, struct pickle **out)
{
	struct pickle *pk CLEANUP(pickle_free_ptr) = mem_zalloc(1, sizeof *pk);
	NEED(pk, "no memory for a pickle");
	pk->records = records;
	TRY(pickle_begin(pk, bytes, n));
	TRY(pickle_run(pk));
	pickle_memo_free(&pk->memo);
	mem_free(pk->stack.p);
	mem_free(pk->marks.p);
	pk->stack = pk->marks = (struct cells){ 0 };
	*out = move(pk);
	return OK;
}

void pickle_free(struct pickle *pk)
{
	if (!pk)
		return;
	pickle_memo_free(&pk->memo);
	mem_free(pk->stack.p);
	mem_free(pk->marks.p);
	mem_free(pk->cells.p);
	buf_free(&pk->text);
	mem_free(pk);
}

void pickle_free_ptr(struct pickle **pk)
{
	pickle_free(*pk);
}
