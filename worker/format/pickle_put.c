/* pickle_put.c: a node of a pickle as a pickle of its own, so that a value can leave the file that it was read from. Opcodes are those of
 * protocol 2, which every reader of torch.save files knows; nothing is memoised, so that no part depends on another. */
#include "format/pickle_impl.h"

struct putting {
	const struct pickle *pk;
	struct buf *b;
	uint32_t depth;
};

static FALLIBLE enum err put(struct putting *p, pnode n);

static FALLIBLE enum err cannot(const struct putting *p, pnode n, const char *why)
{
	char name[128];

	return ERR(FORMAT_PICKLE, "a value with %s (%s), which cannot be taken out of its file", why,
		   pickle_class_name(p->pk, n, name, sizeof name));
}

void pickle_put_str(struct buf *b, struct str s)
{
	buf_putc(b, 'X');
	buf_le32(b, (uint32_t)s.n); /* shorter than the pickle that it is from: PICKLE_BYTES_MAX */
	buf_put(b, s.p, s.n);
}

/* Bytes as the text that has them as latin-1: at most twice as many. */
static FALLIBLE enum err put_latin1(struct buf *b, struct str s)
{
	uint64_t more = 0;

	for (size_t i = 0; i < s.n; i++)
		more += (unsigned char)s.p[i] >> 7;
	if (s.n + more > UINT32_MAX)
		return ERR(LIMIT_EXCEEDED, "a bytes value of %zu bytes", s.n);
	buf_putc(b, 'X');
	buf_le32(b, (uint32_t)(s.n + more));
	for (size_t i = 0; i < s.n; i++) {
		unsigned char c = (unsigned char)s.p[i];
		if (c >= 0x80)
			buf_putc(b, (unsigned char)(0xC0 | c >> 6));
		buf_putc(b, c < 0x80 ? c : (unsigned char)(0x80 | (c & 0x3F)));
	}
	pickle_put_str(b, STR("latin1"));
	return OK;
}

static void put_double(struct buf *b, double v)
{
	uint64_t bits;

	memcpy(&bits, &v, sizeof bits);
	buf_putc(b, 'G');
	for (int k = 64; k > 0; k -= 8)
		buf_putc(b, (unsigned char)(bits >> (k - 8)));
}

void pickle_put_int(struct buf *b, int64_t v)
{
	if (v >= INT32_MIN && v <= INT32_MAX) {
		buf_putc(b, 'J');
		buf_le32(b, (uint32_t)(int32_t)v);
	} else {
		buf_puts(b, "\x8a\x08");
		buf_le64(b, (uint64_t)v);
	}
}

static FALLIBLE enum err put_number(struct putting *p, pnode n)
{
	struct buf *b = p->b;
	bool decimal = false;
	int64_t i;

	if (pickle_int(p->pk, n, &i)) {
		pickle_put_int(b, i);
		return OK;
	}
	struct str big = pickle_bigint(p->pk, n, &decimal);
	if (decimal) {
		buf_putc(b, 'L');
		buf_put(b, big.p, big.n);
		buf_puts(b, "L\n");
		return OK;
	}
	buf_putc(b, big.n < 256 ? 0x8a : 0x8b); /* torch.load(weights_only=True) knows the short one alone */
	if (big.n < 256)
		buf_putc(b, (unsigned char)big.n);
	else
		buf_le32(b, (uint32_t)big.n);
	buf_put(b, big.p, big.n);
	return OK;
}

/* The items of a container, behind a mark. */
static FALLIBLE enum err put_items(struct putting *p, pnode n, unsigned char end)
{
	struct pickle_iter it = pickle_iter(p->pk, n);
	pnode item;

	buf_putc(p->b, '(');
	while (pickle_next(p->pk, &it, &item))
		TRY(put(p, item));
	buf_putc(p->b, end);
	return OK;
}

static FALLIBLE enum err put_global(struct putting *p, pnode n)
{
	struct str module = pickle_module(p->pk, n), name = pickle_name(p->pk, n);

	if (memchr(module.p, '\n', module.n) || memchr(name.p, '\n', name.n))
		return cannot(p, n, "a line break in a name");
	buf_putc(p->b, 'c');
	buf_put(p->b, module.p, module.n);
	buf_putc(p->b, '\n');
	buf_put(p->b, name.p, name.n);
	buf_putc(p->b, '\n');
	return OK;
}

static FALLIBLE enum err put_object(struct putting *p, pnode n)
{
	const struct pickle *pk = p->pk;
	pnode items = pk->cells.p[n + OBJECT_ITEMS], state = pickle_state(pk, n);
	uint32_t opcode = node_head(pk, n) >> HEAD_SHIFT;

	if (opcode != REDUCE && opcode != NEWOBJ)
		return cannot(p, n, "keyword arguments");
	TRY(put(p, pk->cells.p[n + OBJECT_CALLEE]));
	TRY(put(p, pickle_args(pk, n)));
	buf_putc(p->b, (unsigned char)opcode);
	if (items)
		TRY(put_items(p, n, pickle_kind(pk, items) == PK_DICT ? 'u' : 'e'));
	if (!state)
		return OK;
	TRY(put(p, state));
	buf_putc(p->b, 'b');
	return OK;
}

static FALLIBLE enum err put_set(struct putting *p, pnode n, const char *class)
{
	buf_puts(p->b, class);
	buf_putc(p->b, ']');
	TRY(put_items(p, n, 'e'));
	buf_puts(p->b, "\x85R");
	return OK;
}

static FALLIBLE enum err put_bytes(struct putting *p, pnode n, const char *function)
{
	buf_puts(p->b, function);
	TRY(put_latin1(p->b, pickle_bytes(p->pk, n)));
	buf_puts(p->b, "\x86R");
	return OK;
}

static FALLIBLE enum err put_container(struct putting *p, pnode n)
{
	struct buf *b = p->b;

	switch (pickle_kind(p->pk, n)) {
	case PK_TUPLE: return put_items(p, n, 't');
	case PK_SIZE:
		buf_puts(b, "ctorch\nSize\n");
		TRY(put_items(p, n, 't'));
		buf_puts(b, "\x85R");
		return OK;
	case PK_LIST:
		buf_putc(b, ']');
		return put_items(p, n, 'e');
	case PK_DICT:
		buf_putc(b, '}');
		return put_items(p, n, 'u');
	case PK_ORDERED_DICT:
		buf_puts(b, "ccollections\nOrderedDict\n)R");
		return put_items(p, n, 'u');
	case PK_SET: return put_set(p, n, "c__builtin__\nset\n");
	case PK_FROZENSET: return put_set(p, n, "c__builtin__\nfrozenset\n");
	case PK_OBJECT: return put_object(p, n);
	default: return cannot(p, n, "a part that is kept elsewhere");
	}
}

static FALLIBLE enum err put_deeper(struct putting *p, pnode n)
{
	if (++p->depth > PICKLE_DEPTH_MAX)
		return cannot(p, n, "too many levels");
	TRY(put_container(p, n));
	p->depth--;
	return OK;
}

static FALLIBLE enum err put(struct putting *p, pnode n)
{
	double re, im = 0;

	TRY(buf_status(p->b));
	switch (pickle_kind(p->pk, n)) {
	case PK_NONE:
		buf_putc(p->b, 'N');
		return OK;
	case PK_BOOL:
		buf_putc(p->b, pickle_is_true(p->pk, n) ? 0x88 : 0x89);
		return OK;
	case PK_INT:
	case PK_BIGINT: return put_number(p, n);
	case PK_FLOAT:
		if (pickle_float(p->pk, n, &re))
			put_double(p->b, re);
		return OK;
	case PK_COMPLEX:
		buf_puts(p->b, "c__builtin__\ncomplex\n");
		if (pickle_complex(p->pk, n, &re, &im)) {
			put_double(p->b, re);
			put_double(p->b, im);
		}
		buf_puts(p->b, "\x86R");
		return OK;
	case PK_STR:
		pickle_put_str(p->b, pickle_str(p->pk, n));
		return OK;
	case PK_BYTES: return put_bytes(p, n, "c_codecs\nencode\n");
	case PK_BYTEARRAY: return put_bytes(p, n, "c__builtin__\nbytearray\n");
	case PK_GLOBAL: return put_global(p, n);
	default: return put_deeper(p, n);
	}
}

enum err pickle_put_part(const struct pickle *pk, pnode n, struct buf *b)
{
	struct putting p = { .pk = pk, .b = b };

	TRY(put(&p, n));
	return buf_status(b);
}

enum err pickle_put(const struct pickle *pk, pnode n, struct buf *b)
{
	buf_puts(b, "\x80\x02");
	TRY(pickle_put_part(pk, n, b));
	buf_putc(b, '.');
	return buf_status(b);
}
