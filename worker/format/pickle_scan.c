/* pickle_scan.c: cuts the stream into opcodes, and the first pass: which memo entries does the
 * stream ever fetch?
 *
 * CPython puts nearly every object into the memo (14 entries for each chunk of a checkpoint) and
 * fetches few of them. A pass that only looks at PUT and GET opcodes is cheap, and then the second
 * pass keeps the few and knows for all other objects that nobody can come back to them. */
#include "format/pickle_impl.h"

#include "base/mem.h"
#include "base/num.h"

enum arg {
	ARG_UNKNOWN,
	ARG_LEN1, ARG_LEN4, ARG_LEN4_SIGNED, ARG_LEN8,
	ARG_LINE, ARG_TWO_LINES,
	ARG_REFUSED,               /* no checkpoint has it: read only where somebody watches */
	ARG_NO = OP_FIXED, /* plus the number of bytes */
	ARG_1 = OP_FIXED + 1, ARG_2 = OP_FIXED + 2, ARG_4 = OP_FIXED + 4, ARG_8 = OP_FIXED + 8,
};

const unsigned char pickle_op_args[256] = {
	['('] = ARG_NO, ['.'] = ARG_NO, ['0'] = ARG_NO, ['1'] = ARG_NO, ['2'] = ARG_NO, ['N'] = ARG_NO, ['Q'] = ARG_NO,
	['R'] = ARG_NO, ['b'] = ARG_NO, ['a'] = ARG_NO, ['d'] = ARG_NO, ['}'] = ARG_NO, ['e'] = ARG_NO, ['l'] = ARG_NO,
	[']'] = ARG_NO, ['s'] = ARG_NO, ['t'] = ARG_NO, [')'] = ARG_NO, ['u'] = ARG_NO, [0x81] = ARG_NO, [0x85] = ARG_NO,
	[0x86] = ARG_NO, [0x87] = ARG_NO, [0x88] = ARG_NO, [0x89] = ARG_NO, [0x8f] = ARG_NO, [0x90] = ARG_NO,
	[0x91] = ARG_NO, [0x92] = ARG_NO, [0x93] = ARG_NO, [0x94] = ARG_NO,
	['F'] = ARG_LINE, ['I'] = ARG_LINE, ['L'] = ARG_LINE, ['P'] = ARG_LINE, ['S'] = ARG_LINE, ['V'] = ARG_LINE,
	['g'] = ARG_LINE, ['p'] = ARG_LINE, ['c'] = ARG_TWO_LINES,
	['K'] = ARG_1, ['h'] = ARG_1, ['q'] = ARG_1, [0x80] = ARG_1, ['M'] = ARG_2,
	['J'] = ARG_4, ['j'] = ARG_4, ['r'] = ARG_4, ['G'] = ARG_8, [0x95] = ARG_8,
	['U'] = ARG_LEN1, ['C'] = ARG_LEN1, [0x8a] = ARG_LEN1, [0x8c] = ARG_LEN1,
	['T'] = ARG_LEN4_SIGNED, [0x8b] = ARG_LEN4_SIGNED, ['B'] = ARG_LEN4, ['X'] = ARG_LEN4,
	[0x8d] = ARG_LEN8, [0x8e] = ARG_LEN8, [0x96] = ARG_LEN8,
	['i'] = ARG_REFUSED, ['o'] = ARG_REFUSED, [0x82] = ARG_REFUSED, [0x83] = ARG_REFUSED, [0x84] = ARG_REFUSED,
	[0x97] = ARG_REFUSED, [0x98] = ARG_REFUSED,
};

static FALLIBLE enum err counted(struct pickle *pk, struct pickle_op *op, unsigned bytes, bool is_signed)
{
	op->len = reader_le(&pk->in, bytes);
	if (pk->in.failed)
		return BAD(pk, "the stream ends inside an opcode");
	if (is_signed && op->len > INT32_MAX)
		return BAD(pk, "a negative length");
	op->data = reader_take(&pk->in, op->len);
	if (!op->data)
		return BAD(pk, "%ju bytes announced, %ju left", (uintmax_t)op->len, (uintmax_t)reader_left(&pk->in));
	return OK;
}

static FALLIBLE enum err line(struct pickle *pk, const unsigned char **p, uint64_t *len)
{
	const unsigned char *from = pk->in.p + pk->in.at;
	const unsigned char *end = memchr(from, '\n', reader_left(&pk->in));

	if (!end)
		return BAD(pk, "a line without its end");
	*p = from;
	*len = (uint64_t)(end - from);
	pk->in.at += *len + 1;
	return OK;
}

static FALLIBLE enum err fixed(struct pickle *pk, struct pickle_op *op, unsigned bytes)
{
	op->number = reader_le(&pk->in, bytes);
	return pk->in.failed ? BAD(pk, "the stream ends inside an opcode") : OK;
}

static FALLIBLE enum err two_lines(struct pickle *pk, struct pickle_op *op)
{
	TRY(line(pk, &op->data, &op->len));
	return line(pk, &op->data2, &op->len2);
}

static FALLIBLE enum err refused(struct pickle *pk, struct pickle_op *op)
{
	static const char *const names[256] = {
		['i'] = "INST", ['o'] = "OBJ", [0x82] = "EXT1", [0x83] = "EXT2", [0x84] = "EXT4", [0x97] = "NEXT_BUFFER",
		[0x98] = "READONLY_BUFFER",
	};

	if (!pk->watch)
		return BAD(pk, "opcode %s is not allowed", names[op->code]);
	if (op->code == 'i')
		return two_lines(pk, op);
	return op->code >= 0x82 && op->code <= 0x84 ? fixed(pk, op, 1u << (op->code - 0x82)) : OK;
}

enum err pickle_op_slow(struct pickle *pk, struct pickle_op *op)
{
	pk->op_at = pk->in.at;
	op->code = reader_u8(&pk->in);
	if (pk->in.failed)
		return BAD(pk, "the stream ends before STOP");
	switch (pickle_op_args[op->code]) {
	case ARG_NO: return OK;
	case ARG_1: return fixed(pk, op, 1);
	case ARG_2: return fixed(pk, op, 2);
	case ARG_4: return fixed(pk, op, 4);
	case ARG_8: return fixed(pk, op, 8);
	case ARG_LEN1: return counted(pk, op, 1, false);
	case ARG_LEN4: return counted(pk, op, 4, false);
	case ARG_LEN4_SIGNED: return counted(pk, op, 4, true);
	case ARG_LEN8: return counted(pk, op, 8, false);
	case ARG_LINE: return line(pk, &op->data, &op->len);
	case ARG_TWO_LINES: return two_lines(pk, op);
	case ARG_REFUSED: return refused(pk, op);
	default: return BAD(pk, "unknown opcode 0x%02x", op->code);
	}
}

enum err pickle_op_id_slow(struct pickle *pk, const struct pickle_op *op, uint64_t *id_out)
{
	uint64_t id = op->number;

	if (op->code == 'g' || op->code == 'p') {
		struct str text = { (const char *)op->data, op->len };
		if (!str_to_u64(text, &id))
			return BAD(pk, "the memo entry is not a number");
	}
	/* Every entry costs at least one byte; larger numbers would only make us allocate. */
	if (id > pk->in.n)
		return BAD(pk, "memo entry %ju in a stream of %ju bytes", (uintmax_t)id, (uintmax_t)pk->in.n);
	*id_out = id;
	return OK;
}

static FALLIBLE enum err mark_used(struct memo *memo, uint64_t id)
{
	uint64_t word = id >> 6;

	if (word >= memo->words) {
		uint64_t words = num_max(word + 1, memo->words * 2);
		uint64_t *bigger = mem_grow(memo->used, words, sizeof *bigger);
		NEED(bigger, "no memory for the memo");
		memset(bigger + memo->words, 0, (words - memo->words) * sizeof *bigger);
		memo->used = bigger;
		memo->words = words;
	}
	memo->used[word] |= 1ull << (id & 63);
	return OK;
}

/* Goes over opcodes whose argument has a fixed size and which fetch nothing; leaves those at the end to the careful way. */
static void skip_plain(struct pickle *pk)
{
	const unsigned char *p = pk->in.p + pk->in.at, *end = pk->in.p + pk->in.n;

	while (end - p > 1 + (ptrdiff_t)sizeof(uint64_t)) {
		unsigned bytes = pickle_op_args[*p] - (unsigned)OP_FIXED;
		if (bytes > sizeof(uint64_t) || *p == '.' || *p == 'j')
			break;
		if (*p == 'h') {
			/* one byte: the first words are always there */
			pk->memo.used[p[1] >> 6] |= 1ull << (p[1] & 63);
		}
		p += 1 + bytes;
	}
	pk->in.at = (uint64_t)(p - pk->in.p);
}

static FALLIBLE enum err find_used(struct pickle *pk)
{
	struct pickle_op op = { 0 };

	do {
		skip_plain(pk);
		TRY(pickle_op_next(pk, &op));
		if (op.code == 'g' || op.code == 'h' || op.code == 'j') {
			uint64_t id;
			TRY(pickle_op_id(pk, &op, &id));
			TRY(mark_used(&pk->memo, id));
		}
	} while (op.code != '.');
	return OK;
}

enum err pickle_scan(struct pickle *pk)
{
	struct memo *memo = &pk->memo;

	TRY(mark_used(memo, 255)); /* makes room for those of one byte */
	enum err e = find_used(pk);
	if (e != ERR_FORMAT_PICKLE || !pk->watch) /* what a damaged stream does before its damage is watched, too */
		TRY(e);
	err_clear();
	pk->in.at = 0;
	pk->in.failed = false;
	memo->before = mem_alloc(memo->words * sizeof *memo->before);
	NEED(memo->before, "no memory for the memo");
	for (uint64_t i = 0; i < memo->words; i++) {
		memo->before[i] = (uint32_t)memo->value_count;
		memo->value_count += (uint64_t)__builtin_popcountll(memo->used[i]);
	}
	if (pickle_memory(pk) > pk->memory_max) {
		memo->value_count = 0;
		return BAD(pk, "the memo of the pickle needs more than %ju bytes of memory", (uintmax_t)pk->memory_max);
	}
	memo->values = mem_zalloc(memo->value_count, sizeof *memo->values);
	NEED(memo->values, "no memory for the memo");
	return OK;
}

void pickle_memo_free(struct memo *memo)
{
	mem_free(memo->used);
	mem_free(memo->before);
	mem_free(memo->values);
	*memo = (struct memo){ 0 };
}
