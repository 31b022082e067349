/* pickle_call.c: what REDUCE, NEWOBJ and BUILD mean. In Python they run code; here a short list of
 * harmless constructors becomes nodes of their kind and everything else a node that says what would
 * have been called with what. */
#include "format/pickle_impl.h"

static const struct {
	const char *module, *name;
	enum known known;
} table[] = {
	{ "torch", "Size", KNOWN_SIZE },
	{ "collections", "OrderedDict", KNOWN_ORDERED_DICT },
	{ "builtins", "set", KNOWN_SET },
	{ "builtins", "frozenset", KNOWN_FROZENSET },
	{ "builtins", "complex", KNOWN_COMPLEX },
	{ "builtins", "bytes", KNOWN_BYTES },
	{ "builtins", "bytearray", KNOWN_BYTEARRAY },
	{ "builtins", "object", KNOWN_OBJECT },
	{ "builtins", "getattr", KNOWN_GETATTR },
	{ "_codecs", "encode", KNOWN_ENCODE },
	{ "copyreg", "_reconstructor", KNOWN_RECONSTRUCTOR },
};

/* Up to protocol 2, Python 3 writes the module names of Python 2. */
static struct str modern(struct str module)
{
	if (str_is(module, "__builtin__"))
		return STR("builtins");
	return str_is(module, "copy_reg") ? STR("copyreg") : module;
}

enum known call_known(const struct pickle *pk, struct str module, struct str name)
{
	module = modern(module);
	for (size_t i = 0; i < sizeof table / sizeof *table; i++)
		if (str_is(name, table[i].name) && str_is(module, table[i].module))
			return table[i].known;
	for (uint32_t i = 0; pk->records && pk->records[i].name; i++)
		if (str_is(name, pk->records[i].name) && str_is(module, pk->records[i].module))
			return (enum known)(KNOWN_RECORD + i);
	return KNOWN_NOTHING;
}

static FALLIBLE enum err make_object(struct pickle *pk, pnode callee, pnode args, pnode *out)
{
	TRY(node_new(pk, PK_OBJECT, 0, OBJECT_CELLS, out));
	pk->cells.p[*out + OBJECT_CALLEE] = callee;
	pk->cells.p[*out + OBJECT_ARGS] = args;
	return OK;
}

/* Size(tuple): the tuple itself changes its kind, unless somebody else holds it too. */
static FALLIBLE enum err make_size(struct pickle *pk, pnode args, pnode *out)
{
	pnode tuple = pickle_at(pk, args, 0);
	bool shared = node_shared(pk, args) || node_shared(pk, tuple) || !node_is_cell(tuple);

	node_release(pk, args);
	if (!shared) {
		uint32_t *head = &pk->cells.p[tuple];
		*head = (*head & ~(uint32_t)HEAD_KIND) | PK_SIZE;
		*out = tuple;
		return OK;
	}
	uint64_t n = pickle_count(pk, tuple);
	TRY(node_new(pk, PK_SIZE, (uint32_t)n, 1 + (uint32_t)n, out));
	for (uint64_t i = 0; i < n; i++)
		pk->cells.p[*out + 1 + i] = pickle_at(pk, tuple, i);
	return OK;
}

/* set([…]) and OrderedDict(): a container of its own with copies of the references. `pairs`: the items are tuples of two. */
static FALLIBLE enum err make_container(struct pickle *pk, enum pickle_kind kind, pnode from, pnode *out)
{
	bool pairs = kind == PK_ORDERED_DICT;
	pnode item, two[2];

	TRY(node_list(pk, kind, out));
	struct pickle_iter it = pickle_iter(pk, from);
	/* The source may be the list that grows at the end of the array; it cannot be `out`, so this ends. */
	while (pickle_next(pk, &it, &item)) {
		if (!pairs) {
			TRY(node_extend(pk, *out, &item, 1));
			continue;
		}
		struct pickle_iter pair = pickle_iter(pk, item);
		if (pickle_count(pk, item) != 2 || !pickle_next(pk, &pair, &two[0]) || !pickle_next(pk, &pair, &two[1]))
			return BAD(pk, "an OrderedDict made of something else than pairs");
		node_share(pk, item);
		TRY(node_extend(pk, *out, two, 2));
	}
	/* The items have two owners now; all that counts is that nobody takes a container for his own. */
	it = pickle_iter(pk, *out);
	while (pickle_next(pk, &it, &item))
		node_share(pk, item);
	return OK;
}

static bool number(const struct pickle *pk, pnode n, double *out)
{
	int64_t i;

	if (pickle_float(pk, n, out))
		return true;
	if (!pickle_int(pk, n, &i))
		return false;
	*out = (double)i;
	return true;
}

static FALLIBLE enum err make_complex(struct pickle *pk, double re, double im, pnode *out)
{
	TRY(node_new(pk, PK_COMPLEX, 0, 5, out));
	memcpy(&pk->cells.p[*out + 1], &re, sizeof re);
	memcpy(&pk->cells.p[*out + 3], &im, sizeof im);
	return OK;
}

static bool is_latin1(const struct pickle *pk, pnode n)
{
	struct str s = pickle_str(pk, n);
	return str_is(s, "latin1") || str_is(s, "latin-1");
}

/* bytes(), bytearray(b'…'), bytearray('…', 'latin-1'), _codecs.encode('…', 'latin1'). */
static FALLIBLE enum err make_bytes(struct pickle *pk, enum known known, pnode callee, pnode args, pnode *out)
{
	enum pickle_kind kind = known == KNOWN_BYTEARRAY ? PK_BYTEARRAY : PK_BYTES;
	uint64_t n = pickle_count(pk, args);
	pnode a = pickle_at(pk, args, 0);

	if (n == 0 && known != KNOWN_ENCODE)
		return node_ref(pk, kind, pk->in.p, 0, out);
	if (n == 2 && known != KNOWN_BYTES && pickle_kind(pk, a) == PK_STR && is_latin1(pk, pickle_at(pk, args, 1)))
		return text_latin1(pk, kind, a, out);
	if (n == 1 && known == KNOWN_BYTEARRAY && pickle_kind(pk, a) == PK_BYTES) {
		TRY(node_new(pk, kind, 0, STR_CELLS, out));
		memcpy(&pk->cells.p[*out + 1], &pk->cells.p[a + 1], 2 * sizeof *pk->cells.p);
		return OK;
	}
	return make_object(pk, callee, args, out);
}

static FALLIBLE enum err make_record(struct pickle *pk, uint32_t index, pnode args, pnode *out)
{
	node_release(pk, args);
	return node_new(pk, PK_RECORD, index, 1 + pk->records[index].field_count, out);
}

enum known call_known_of(const struct pickle *pk, pnode n)
{
	return pickle_kind(pk, n) == PK_GLOBAL ? (enum known)(node_head(pk, n) >> HEAD_SHIFT) : KNOWN_NOTHING;
}

static bool is_sequence(const struct pickle *pk, pnode n)
{
	enum pickle_kind kind = pickle_kind(pk, n);
	return kind == PK_LIST || kind == PK_TUPLE;
}

static FALLIBLE enum err call_plain(struct pickle *pk, pnode callee, pnode args, pnode *out)
{
	enum known known = call_known_of(pk, callee);
	uint64_t n = pickle_count(pk, args);
	pnode arg = pickle_at(pk, args, 0);
	double re, im;

	switch (known) {
	case KNOWN_SIZE:
		if (n == 1 && pickle_kind(pk, arg) == PK_TUPLE)
			return make_size(pk, args, out);
		break;
	case KNOWN_ORDERED_DICT:
	case KNOWN_SET:
	case KNOWN_FROZENSET:
		if (n == 0 || (n == 1 && is_sequence(pk, arg)))
			return make_container(pk, known == KNOWN_SET ? PK_SET : known == KNOWN_FROZENSET ?
						      PK_FROZENSET : PK_ORDERED_DICT, n ? arg : 0, out);
		break;
	case KNOWN_COMPLEX:
		if (n == 2 && number(pk, arg, &re) && number(pk, pickle_at(pk, args, 1), &im))
			return make_complex(pk, re, im, out);
		break;
	case KNOWN_BYTES:
	case KNOWN_BYTEARRAY:
	case KNOWN_ENCODE: return make_bytes(pk, known, callee, args, out);
	default:
		if (known >= KNOWN_RECORD)
			return make_record(pk, (uint32_t)known - KNOWN_RECORD, args, out);
	}
	return make_object(pk, callee, args, out);
}

enum err call_make(struct pickle *pk, pnode callee, pnode args, pnode *out)
{
	enum pickle_kind kind = pickle_kind(pk, callee);
	pnode arg = pickle_at(pk, args, 0);

	if (pickle_kind(pk, args) != PK_TUPLE)
		return BAD(pk, "arguments that are no tuple");
	if (kind != PK_GLOBAL && kind != PK_OBJECT)
		return BAD(pk, "a call of something that is no class or function");
	/* Protocols 0 and 1 make objects so: _reconstructor(cls, object, None). */
	if (call_known_of(pk, callee) == KNOWN_RECONSTRUCTOR && pickle_count(pk, args) == 3 &&
	    pickle_kind(pk, arg) == PK_GLOBAL && call_known_of(pk, pickle_at(pk, args, 1)) == KNOWN_OBJECT) {
		TRY(call_plain(pk, arg, N_EMPTY_TUPLE, out));
		if (pickle_kind(pk, *out) == PK_OBJECT)
			pk->cells.p[*out] |= (uint32_t)NEWOBJ << HEAD_SHIFT;
		return OK;
	}
	return call_plain(pk, callee, args, out);
}

/* Attribute names come from the memo, the same node each time. A string node never moves or changes. */
static int field_index(struct pickle *pk, uint32_t record, pnode key)
{
	__typeof__(&pk->fields[0]) known = &pk->fields[(key + 7 * record) % FIELDS_CACHED];
	const struct pickle_record *r = &pk->records[record];
	struct str name = pickle_str(pk, key);

	if (known->key == key && known->record == record)
		return known->field;
	known->field = -1;
	for (uint32_t i = 0; i < r->field_count; i++)
		if (str_is(name, r->fields[i]))
			known->field = (int)i;
	known->key = key;
	known->record = record;
	return known->field;
}

static void set_fields(struct pickle *pk, pnode inst, pnode dict)
{
	uint32_t record = node_head(pk, inst) >> HEAD_SHIFT;
	bool kept = node_shared(pk, dict);
	struct pickle_iter it = pickle_iter(pk, dict);
	pnode key, value;

	while (pickle_next(pk, &it, &key) && pickle_next(pk, &it, &value)) {
		int i = field_index(pk, record, key);
		if (i < 0)
			continue;
		pk->cells.p[inst + 1 + (uint32_t)i] = value;
		if (kept)
			node_share(pk, value);
	}
	node_release(pk, dict);
}

/* A record takes the attributes it has fields for from a dict, or from the two dicts of a class with slots. */
static FALLIBLE enum err build_record(struct pickle *pk, pnode inst, pnode state)
{
	enum pickle_kind kind = pickle_kind(pk, state);

	if (kind == PK_DICT) {
		set_fields(pk, inst, state);
	} else if (kind == PK_TUPLE && pickle_count(pk, state) == 2) {
		for (uint64_t i = 0; i < 2; i++) {
			pnode part = pickle_at(pk, state, i);
			if (pickle_kind(pk, part) == PK_DICT) {
				node_share(pk, part);
				set_fields(pk, inst, part);
			}
		}
	} else if (kind != PK_NONE) {
		char name[64];
		return BAD(pk, "the attributes of an object are a %s", pickle_class_name(pk, state, name, sizeof name));
	}
	return OK;
}

enum err call_build(struct pickle *pk, pnode inst, pnode state)
{
	char name[64];

	switch (pickle_kind(pk, inst)) {
	case PK_RECORD: return build_record(pk, inst, state);
	case PK_OBJECT:
		pk->cells.p[inst + OBJECT_STATE] = state;
		return OK;
	case PK_ORDERED_DICT: return OK; /* attributes such as the _metadata of a module's state dict */
	default: return BAD(pk, "BUILD of a %s", pickle_class_name(pk, inst, name, sizeof name));
	}
}
