/* pickle_node.c: the nodes of a pickle: making them (pickle_impl.h has the layout) and looking at
 * them (pickle.h).
 *
 * 32-bit cells with indices, instead of structs with pointers, because the pickle of a million
 * chunks holds ten million objects. */
#include "format/pickle_impl.h"

#include <stdio.h>

#include "base/mem.h"
#include "base/num.h"

uint64_t pickle_memory(const struct pickle *pk)
{
	uint64_t cells = (uint64_t)pk->cells.cap + pk->stack.cap + pk->marks.cap + pk->memo.value_count;

	return cells * sizeof *pk->cells.p + pk->text.cap;
}

enum err node_room(struct pickle *pk, struct cells *c, uint64_t more)
{
	uint64_t need = c->count + more, most = c->cap + (pk->memory_max - pickle_memory(pk)) / sizeof *c->p;
	uint64_t cap = c->cap ? c->cap : 256;

	if (need > most)
		return BAD(pk, "the objects of the pickle need more than %ju bytes of memory", (uintmax_t)pk->memory_max);
	while (cap < need)
		cap *= 2;
	cap = num_min(cap, most);
	uint32_t *bigger = mem_grow(c->p, cap, sizeof *bigger);
	NEED(bigger, "no memory for the objects of a pickle");
	c->p = bigger;
	c->cap = (uint32_t)cap;
	return OK;
}

static FALLIBLE enum err take(struct pickle *pk, uint64_t cells, uint32_t *at_out)
{
	if (cells > pk->cells.cap - pk->cells.count)
		TRY(node_room(pk, &pk->cells, cells));
	*at_out = pk->cells.count;
	pk->cells.count += (uint32_t)cells;
	return OK;
}

enum err node_new(struct pickle *pk, enum pickle_kind kind, uint32_t arg, uint32_t cells, pnode *out)
{
	TRY(take(pk, cells, out));
	pk->cells.p[*out] = (uint32_t)kind | arg << HEAD_SHIFT;
	for (uint32_t i = 1; i < cells; i++)
		pk->cells.p[*out + i] = 0;
	return OK;
}

static FALLIBLE enum err node_u64(struct pickle *pk, enum pickle_kind kind, uint64_t v, pnode *out)
{
	TRY(node_new(pk, kind, 0, STR_CELLS, out));
	pk->cells.p[*out + 1] = (uint32_t)v;
	pk->cells.p[*out + 2] = (uint32_t)(v >> 32);
	return OK;
}

enum err node_int(struct pickle *pk, int64_t v, pnode *out)
{
	if (v >= -(1 << 30) && v < 1 << 30) {
		*out = (uint32_t)v | N_SMALL;
		return OK;
	}
	return node_u64(pk, PK_INT, (uint64_t)v, out);
}

enum err node_double(struct pickle *pk, double v, pnode *out)
{
	uint64_t bits;

	memcpy(&bits, &v, sizeof bits);
	return node_u64(pk, PK_FLOAT, bits, out);
}

enum err node_ref(struct pickle *pk, enum pickle_kind kind, const unsigned char *p, uint64_t n, pnode *out)
{
	TRY(node_new(pk, kind, 0, STR_CELLS, out));
	pk->cells.p[*out + 1] = n ? (uint32_t)(p - pk->in.p) : 0;
	pk->cells.p[*out + 2] = (uint32_t)n;
	return OK;
}

enum err node_text(struct pickle *pk, enum pickle_kind kind, uint64_t from, pnode *out)
{
	TRY(buf_status(&pk->text));
	TRY(node_new(pk, kind, 0, STR_CELLS, out));
	pk->cells.p[*out + 1] = (uint32_t)from | TEXT_BIT;
	pk->cells.p[*out + 2] = (uint32_t)(pk->text.len - from);
	return OK;
}

enum err node_tuple(struct pickle *pk, enum pickle_kind kind, const pnode *items, uint64_t n, pnode *out)
{
	if (n == 0 && kind == PK_TUPLE) {
		*out = N_EMPTY_TUPLE;
		return OK;
	}
	if (n > HEAD_ARG_MAX)
		return ERR(LIMIT_EXCEEDED, "a tuple of %ju elements", (uintmax_t)n);
	TRY(node_new(pk, kind, (uint32_t)n, 1 + (uint32_t)n, out));
	for (uint64_t i = 0; i < n; i++)
		pk->cells.p[*out + 1 + i] = items[i];
	return OK;
}

enum err node_list(struct pickle *pk, enum pickle_kind kind, pnode *out)
{
	return node_new(pk, kind, 0, LIST_CELLS, out);
}

/* Extends the last block where it ends the array, else chains a new one. */
enum err node_extend(struct pickle *pk, pnode list, const pnode *items, uint64_t n)
{
	uint32_t last = pk->cells.p[list + LIST_LAST], at;

	if (n == 0)
		return OK;
	if (last && last + BLOCK_HEAD + pk->cells.p[last + 1] == pk->cells.count) {
		TRY(take(pk, n, &at));
	} else {
		TRY(take(pk, BLOCK_HEAD + n, &at));
		pk->cells.p[at] = pk->cells.p[at + 1] = 0;
		pk->cells.p[last ? last : list + LIST_FIRST] = at;
		pk->cells.p[list + LIST_LAST] = last = at;
		at += BLOCK_HEAD;
	}
	pk->cells.p[last + 1] += (uint32_t)n;
	pk->cells.p[list + LIST_COUNT] += (uint32_t)n;
	memcpy(pk->cells.p + at, items, n * sizeof *items);
	return OK;
}

void node_release(struct pickle *pk, pnode n)
{
	if (!node_is_cell(n) || node_shared(pk, n))
		return;
	const uint32_t *c = pk->cells.p + n;
	uint32_t end;

	switch (c[0] & HEAD_KIND) {
	case PK_TUPLE:
		end = n + 1 + (c[0] >> HEAD_SHIFT);
		break;
	case PK_LIST:
	case PK_DICT:
		end = n + LIST_CELLS;
		if (c[LIST_FIRST] != c[LIST_LAST] || (c[LIST_FIRST] && c[LIST_FIRST] != end))
			return;
		if (c[LIST_FIRST])
			end += BLOCK_HEAD + c[LIST_CELLS + 1];
		break;
	default:
		return;
	}
	if (end == pk->cells.count)
		pk->cells.count = n;
}

pnode pickle_root(const struct pickle *pk)
{
	return pk->root;
}

uint64_t pickle_consumed(const struct pickle *pk)
{
	return pk->in.at;
}

enum pickle_kind pickle_kind(const struct pickle *pk, pnode n)
{
	if (n & N_SMALL)
		return PK_INT;
	switch (n) {
	case 0: return PK_ABSENT;
	case N_NONE: return PK_NONE;
	case N_FALSE:
	case N_TRUE: return PK_BOOL;
	case N_EMPTY_TUPLE: return PK_TUPLE;
	case N_FRESH_DICT: return PK_DICT;
	default: return (enum pickle_kind)(node_head(pk, n) & HEAD_KIND);
	}
}

static bool is_kind(const struct pickle *pk, pnode n, enum pickle_kind kind)
{
	return node_is_cell(n) && (node_head(pk, n) & HEAD_KIND) == kind;
}

static uint64_t cell_u64(const struct pickle *pk, uint32_t at)
{
	return pk->cells.p[at] | (uint64_t)pk->cells.p[at + 1] << 32;
}

static double cell_double(const struct pickle *pk, uint32_t at)
{
	uint64_t bits = cell_u64(pk, at);
	double v;

	memcpy(&v, &bits, sizeof v);
	return v;
}

bool pickle_is_true(const struct pickle *, pnode n)
{
	return n == N_TRUE;
}

bool pickle_int(const struct pickle *pk, pnode n, int64_t *out)
{
	if (n & N_SMALL)
		*out = (int32_t)(n << 1) >> 1;
	else if (is_kind(pk, n, PK_INT))
		*out = (int64_t)cell_u64(pk, n + 1);
	else
		return false;
	return true;
}

bool pickle_float(const struct pickle *pk, pnode n, double *out)
{
	if (!is_kind(pk, n, PK_FLOAT))
		return false;
	*out = cell_double(pk, n + 1);
	return true;
}

bool pickle_complex(const struct pickle *pk, pnode n, double *re, double *im)
{
	if (!is_kind(pk, n, PK_COMPLEX))
		return false;
	*re = cell_double(pk, n + 1);
	*im = cell_double(pk, n + 3);
	return true;
}

static struct str cell_str(const struct pickle *pk, pnode n)
{
	uint32_t off = pk->cells.p[n + 1], len = pk->cells.p[n + 2];
	const unsigned char *base = off & TEXT_BIT ? pk->text.p : pk->in.p;

	return len ? (struct str){ (const char *)base + (off & ~TEXT_BIT), len } : (struct str){ "", 0 };
}

struct str pickle_str(const struct pickle *pk, pnode n)
{
	return is_kind(pk, n, PK_STR) ? cell_str(pk, n) : (struct str){ "", 0 };
}

struct str pickle_bytes(const struct pickle *pk, pnode n)
{
	return is_kind(pk, n, PK_BYTES) || is_kind(pk, n, PK_BYTEARRAY) ? cell_str(pk, n) : (struct str){ "", 0 };
}

struct str pickle_bigint(const struct pickle *pk, pnode n, bool *decimal_out)
{
	if (!is_kind(pk, n, PK_BIGINT))
		return (struct str){ "", 0 };
	*decimal_out = node_head(pk, n) >> HEAD_SHIFT;
	return cell_str(pk, n);
}

/* The cell of the list that holds a node's items; 0 if it has none. */
static pnode items_of(const struct pickle *pk, pnode n)
{
	switch (pickle_kind(pk, n)) {
	case PK_LIST:
	case PK_DICT:
	case PK_ORDERED_DICT:
	case PK_SET:
	case PK_FROZENSET: return n;
	case PK_OBJECT: return pk->cells.p[n + OBJECT_ITEMS];
	default: return 0;
	}
}

static bool is_tuple(const struct pickle *pk, pnode n)
{
	return is_kind(pk, n, PK_TUPLE) || is_kind(pk, n, PK_SIZE);
}

uint64_t pickle_count(const struct pickle *pk, pnode n)
{
	if (is_tuple(pk, n))
		return node_head(pk, n) >> HEAD_SHIFT;
	pnode list = items_of(pk, n);
	if (!node_is_cell(list))
		return 0;
	uint32_t kind = node_head(pk, list) & HEAD_KIND, count = pk->cells.p[list + LIST_COUNT];
	return kind == PK_DICT || kind == PK_ORDERED_DICT ? count / 2 : count;
}

pnode pickle_at(const struct pickle *pk, pnode tuple, uint64_t i)
{
	if (!is_tuple(pk, tuple) || i >= node_head(pk, tuple) >> HEAD_SHIFT)
		return 0;
	return pk->cells.p[tuple + 1 + i];
}

struct pickle_iter pickle_iter(const struct pickle *pk, pnode n)
{
	if (is_tuple(pk, n))
		return (struct pickle_iter){ n | N_SMALL, 0 };
	pnode list = items_of(pk, n);
	return (struct pickle_iter){ node_is_cell(list) ? pk->cells.p[list + LIST_FIRST] : 0, 0 };
}

bool pickle_next(const struct pickle *pk, struct pickle_iter *it, pnode *item_out)
{
	*item_out = 0;
	if (it->block & N_SMALL) {
		*item_out = pickle_at(pk, it->block & ~N_SMALL, it->at++);
		return *item_out != 0;
	}
	if (!it->block)
		return false;
	*item_out = pk->cells.p[it->block + BLOCK_HEAD + it->at];
	if (++it->at == pk->cells.p[it->block + 1])
		*it = (struct pickle_iter){ pk->cells.p[it->block], 0 };
	return true;
}

pnode pickle_dict_get(const struct pickle *pk, pnode dict, const char *key)
{
	enum pickle_kind kind = pickle_kind(pk, dict);
	pnode k, v, found = 0;

	if (kind != PK_DICT && kind != PK_ORDERED_DICT)
		return 0;
	struct pickle_iter it = pickle_iter(pk, dict);
	while (pickle_next(pk, &it, &k) && pickle_next(pk, &it, &v))
		if (str_is(pickle_str(pk, k), key) && is_kind(pk, k, PK_STR))
			found = v;
	return found;
}

static pnode global_of(const struct pickle *pk, pnode n)
{
	if (is_kind(pk, n, PK_OBJECT))
		n = pk->cells.p[n + OBJECT_CALLEE];
	return is_kind(pk, n, PK_GLOBAL) ? n : 0;
}

struct str pickle_module(const struct pickle *pk, pnode n)
{
	pnode g = global_of(pk, n);
	return g ? pickle_str(pk, pk->cells.p[g + 1]) : (struct str){ "", 0 };
}

struct str pickle_name(const struct pickle *pk, pnode n)
{
	pnode g = global_of(pk, n);
	return g ? pickle_str(pk, pk->cells.p[g + 2]) : (struct str){ "", 0 };
}

bool pickle_is_call(const struct pickle *pk, pnode n, const char *module, const char *name)
{
	return is_kind(pk, n, PK_OBJECT) && str_is(pickle_module(pk, n), module) && str_is(pickle_name(pk, n), name);
}

pnode pickle_args(const struct pickle *pk, pnode n)
{
	if (is_kind(pk, n, PK_PERSID))
		return pk->cells.p[n + 1];
	return is_kind(pk, n, PK_OBJECT) ? pk->cells.p[n + OBJECT_ARGS] : 0;
}

pnode pickle_state(const struct pickle *pk, pnode n)
{
	return is_kind(pk, n, PK_OBJECT) ? pk->cells.p[n + OBJECT_STATE] : 0;
}

uint32_t pickle_record_id(const struct pickle *pk, pnode n)
{
	return is_kind(pk, n, PK_RECORD) ? pk->records[node_head(pk, n) >> HEAD_SHIFT].id : UINT32_MAX;
}

pnode pickle_field(const struct pickle *pk, pnode n, uint32_t i)
{
	if (!is_kind(pk, n, PK_RECORD) || i >= pk->records[node_head(pk, n) >> HEAD_SHIFT].field_count)
		return 0;
	return pk->cells.p[n + 1 + i];
}

static const char *const kind_names[] = {
	[PK_ABSENT] = "nothing", [PK_NONE] = "None", [PK_BOOL] = "bool", [PK_INT] = "int", [PK_BIGINT] = "int",
	[PK_FLOAT] = "float", [PK_COMPLEX] = "complex", [PK_STR] = "str", [PK_BYTES] = "bytes",
	[PK_BYTEARRAY] = "bytearray", [PK_TUPLE] = "tuple", [PK_SIZE] = "torch.Size", [PK_LIST] = "list",
	[PK_DICT] = "dict", [PK_ORDERED_DICT] = "collections.OrderedDict", [PK_SET] = "set",
	[PK_FROZENSET] = "frozenset", [PK_GLOBAL] = "a class or function", [PK_PERSID] = "a persistent id",
	[PK_OBJECT] = "an object", [PK_RECORD] = "a record",
};

const char *pickle_class_name(const struct pickle *pk, pnode n, char *into, size_t max)
{
	enum pickle_kind kind = pickle_kind(pk, n);

	if (kind == PK_RECORD) {
		const struct pickle_record *r = &pk->records[node_head(pk, n) >> HEAD_SHIFT];
		snprintf(into, max, "%s.%s", r->module, r->name);
		return into;
	}
	struct str module = pickle_module(pk, n), name = pickle_name(pk, n);
	if (kind == PK_OBJECT && (str_is(name, "_reconstructor") || str_is(name, "_reconstruct"))) {
		pnode of = pickle_at(pk, pickle_args(pk, n), 0);
		module = pickle_module(pk, of);
		name = pickle_name(pk, of);
	}
	if (name.n)
		snprintf(into, max, "%.*s.%.*s", (int)(module.n & 0xffff), module.p, (int)(name.n & 0xffff), name.p);
	else
		snprintf(into, max, "%s", kind_names[kind]);
	return into;
}
