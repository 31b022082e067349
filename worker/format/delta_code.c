/* delta_code.c: see delta_code.h. */
#include "format/delta_code.h"

#include <endian.h>
#include <string.h>
#include <zstd.h>
#include <zstd_errors.h>

#include "base/mem.h"
#include "base/num.h"

enum { LEVEL = 1, WINDOW_LOG_MAX = 23, ROOM = 32 << 10, HEAD = 4 };

static uint64_t word_at(const unsigned char *p)
{
	uint64_t v;

	memcpy(&v, p, sizeof v);
	return v;
}

/* Words are compared first: most are equal. */
uint64_t delta_count(const unsigned char *base, const unsigned char *now, size_t n)
{
	const uint64_t low = 0x7F7F7F7F7F7F7F7F, ones = 0x0101010101010101;
	uint64_t sum = 0;
	size_t i = 0;

	for (; i + sizeof low <= n; i += sizeof low) {
		uint64_t x = word_at(base + i) ^ word_at(now + i);
		if (x) /* the top bit of each byte that is not 0, moved down; their sum is the product's top byte */
			sum += ((((((x & low) + low) | x) & ~low) >> 7) * ones) >> 56;
	}
	for (; i < n; i++)
		sum += base[i] != now[i];
	return sum;
}

static void put_xor(unsigned char *to, const unsigned char *a, const unsigned char *b, size_t n)
{
	size_t i = 0;

	for (; i + sizeof(uint64_t) <= n; i += sizeof(uint64_t)) {
		uint64_t x = word_at(a + i) ^ word_at(b + i);
		memcpy(to + i, &x, sizeof x);
	}
	for (; i < n; i++)
		to[i] = a[i] ^ b[i];
}

enum err delta_bound(enum delta_encoding encoding, uint64_t bytes, uint64_t *out)
{
	uint64_t raw = bytes;

	if (encoding == DELTA_OVERWRITE) {
		if (bytes > 1ull << DELTA_OVERWRITE_SHIFT)
			return ERR(LIMIT_EXCEEDED, "an overwrite has positions of 32 bits, and the tensor has %ju bytes: use xor",
				   (uintmax_t)bytes);
		raw = HEAD + 5 * bytes;
	}
	if (raw > UINT64_MAX / 2)
		return ERR(LIMIT_EXCEEDED, "a tensor of %ju bytes", (uintmax_t)bytes);
	*out = raw + raw / 128 + 1024; /* more than ZSTD_compressBound() */
	return OK;
}

/* ----------------------------------------------------------------------------------------------------- encoding */

struct delta_encoder {
	ZSTD_CCtx *zstd;
	enum delta_encoding encoding;
	size_t seen;                   /* of the block, by the passes */
	size_t at, n;                  /* what of `room` zstd has not taken yet */
	unsigned char room[ROOM];
};

enum err delta_encoder_new(struct delta_encoder **out)
{
	struct delta_encoder *e = mem_zalloc(1, sizeof *e);

	NEED(e, "no memory for an encoder");
	e->zstd = ZSTD_createCCtx();
	if (!e->zstd) {
		mem_free(e);
		return ERR(NO_MEMORY, "no memory for a zstd encoder");
	}
	*out = e;
	return OK;
}

void delta_encoder_free(struct delta_encoder *e)
{
	if (e)
		ZSTD_freeCCtx(e->zstd);
	mem_free(e);
}

static FALLIBLE enum err check(size_t result)
{
	return ZSTD_isError(result) ? ERR(INTERNAL, "zstd: %s", ZSTD_getErrorName(result)) : OK;
}

enum err delta_encode_begin(struct delta_encoder *e, enum delta_encoding encoding, uint64_t bytes, uint64_t changed)
{
	uint32_t head = htole32((uint32_t)changed);

	e->encoding = encoding;
	e->seen = e->at = e->n = 0;
	TRY(check(ZSTD_CCtx_reset(e->zstd, ZSTD_reset_session_and_parameters)));
	TRY(check(ZSTD_CCtx_setParameter(e->zstd, ZSTD_c_compressionLevel, LEVEL)));
	if (encoding == DELTA_OVERWRITE) {
		if (changed > UINT32_MAX)
			return ERR(LIMIT_EXCEEDED, "an overwrite of %ju bytes: use xor", (uintmax_t)changed);
		memcpy(e->room, &head, sizeof head);
		e->n = sizeof head;
	}
	return check(ZSTD_CCtx_setPledgedSrcSize(e->zstd, encoding == DELTA_XOR ? bytes : HEAD + 5 * changed));
}

/* Fills the room from the block, from `seen` on. */
static void refill(struct delta_encoder *e, unsigned pass, uint64_t at, const unsigned char *base, const unsigned char *now, size_t n)
{
	size_t i = e->seen, k = 0;

	if (e->encoding == DELTA_XOR) {
		k = num_min(ROOM, n - i);
		put_xor(e->room, base + i, now + i, k);
		i += k;
	}
	while (i < n && k + 4 <= ROOM && e->encoding == DELTA_OVERWRITE) {
		if (n - i >= 64 && memcmp(base + i, now + i, 64) == 0) {
			i += 64;
			continue;
		}
		if (base[i] != now[i] && pass == 0) {
			uint32_t position = htole32((uint32_t)(at + i));
			memcpy(e->room + k, &position, sizeof position);
			k += sizeof position;
		} else if (base[i] != now[i]) {
			e->room[k++] = now[i];
		}
		i++;
	}
	e->seen = i;
	e->at = 0;
	e->n = k;
}

/* Gives zstd what is in the room. */
static FALLIBLE enum err push(struct delta_encoder *e, ZSTD_EndDirective how, struct delta_out *to, size_t *left_out)
{
	ZSTD_inBuffer in = { e->room, e->n, e->at };
	ZSTD_outBuffer out = { to->p, to->cap, to->n };

	*left_out = ZSTD_compressStream2(e->zstd, &out, &in, how);
	TRY(check(*left_out));
	e->at = in.pos;
	to->n = out.pos;
	return OK;
}

enum err delta_encode(struct delta_encoder *e, unsigned pass, uint64_t at, const unsigned char *base, const unsigned char *now,
		      size_t n, struct delta_out *to, bool *more_out)
{
	size_t left;

	*more_out = false;
	for (;;) {
		while (e->at < e->n) {
			if (to->n == to->cap) {
				*more_out = true;
				return OK;
			}
			TRY(push(e, ZSTD_e_continue, to, &left));
		}
		if (e->seen == n)
			break;
		refill(e, pass, at, base, now, n);
	}
	e->seen = 0;
	return OK;
}

enum err delta_encode_end(struct delta_encoder *e, struct delta_out *to, bool *more_out)
{
	size_t left = 1;

	while (left && to->n < to->cap)
		TRY(push(e, ZSTD_e_end, to, &left));
	*more_out = left != 0;
	return OK;
}

/* ----------------------------------------------------------------------------------------------------- decoding */

const char *delta_fault_text(enum delta_fault fault, unsigned code)
{
	static const char *const texts[] = {
		[DELTA_FINE] = "nothing", [DELTA_WINDOW] = "the zstd frame needs a window of more than 8 MiB",
		[DELTA_SHORT] = "the zstd frame ends too early", [DELTA_LONG] = "the zstd frame gives more bytes than the tensor needs",
		[DELTA_TRAILING] = "there are bytes behind the zstd frame", [DELTA_COUNT] = "it overwrites more bytes than the tensor has",
		[DELTA_POSITION] = "a position is not behind the one before it, or outside of the tensor",
		[DELTA_CHECKSUM] = "the new bytes are others than the delta was made of",
	};

	return fault == DELTA_ZSTD ? ZSTD_getErrorString((ZSTD_ErrorCode)code) : texts[fault];
}

enum err delta_decoder_open(struct delta_decoder *d)
{
	*d = (struct delta_decoder){ .room = mem_alloc(DELTA_CURSORS * ROOM) };
	NEED(d->room, "no memory for a decoder");
	for (unsigned i = 0; i < DELTA_CURSORS; i++) {
		struct delta_cursor *c = &d->cursors[i];
		c->zstd = ZSTD_createDCtx();
		c->input = mem_alloc(DELTA_INPUT);
		NEED(c->zstd && c->input, "no memory for a zstd decoder");
		if (ZSTD_isError(ZSTD_DCtx_setParameter(c->zstd, ZSTD_d_windowLogMax, WINDOW_LOG_MAX)))
			return ERR(INTERNAL, "zstd refuses a window of 2^%d bytes", WINDOW_LOG_MAX);
	}
	return OK;
}

void delta_decoder_free(struct delta_decoder *d)
{
	for (unsigned i = 0; i < DELTA_CURSORS; i++) {
		ZSTD_freeDCtx(d->cursors[i].zstd);
		mem_free(d->cursors[i].input);
	}
	mem_free(d->room);
}

void delta_decode_begin(struct delta_decoder *d, enum delta_encoding encoding, uint64_t bytes, uint64_t blob_bytes)
{
	for (unsigned i = 0; i < DELTA_CURSORS; i++) {
		struct delta_cursor *c = &d->cursors[i];
		(void)ZSTD_DCtx_reset(c->zstd, ZSTD_reset_session_only);
		c->at = c->n = 0;
		c->taken = 0;
		c->done = false;
		d->pieces[i].at = d->pieces[i].n = 0;
	}
	d->encoding = encoding;
	d->bytes = bytes;
	d->blob_bytes = blob_bytes;
	d->fault = DELTA_FINE;
	d->count = d->positions = d->values = d->skip = 0;
	d->has_count = d->has_position = false;
	d->filled = 0;
}

size_t delta_wants(const struct delta_decoder *d, unsigned cursor)
{
	const struct delta_cursor *c = &d->cursors[cursor];

	if (d->fault || c->done || c->at < c->n || (cursor && d->encoding == DELTA_XOR))
		return 0;
	return (size_t)num_min(DELTA_INPUT, d->blob_bytes - c->taken);
}

void delta_took(struct delta_decoder *d, unsigned cursor, size_t n)
{
	struct delta_cursor *c = &d->cursors[cursor];

	c->at = 0;
	c->n = n;
	c->taken += n;
}

static void fail(struct delta_decoder *d, enum delta_fault fault)
{
	d->fault = fault;
}

static void fail_zstd(struct delta_decoder *d, size_t result)
{
	ZSTD_ErrorCode code = ZSTD_getErrorCode(result);

	d->fault = code == ZSTD_error_frameParameter_windowTooLarge ? DELTA_WINDOW : DELTA_ZSTD;
	d->fault_code = (unsigned)code;
}

/* Decompresses up to n bytes. Fewer: the cursor wants input, or the frame is at its end (`done`), or there is a fault. */
static size_t pull(struct delta_decoder *d, unsigned cursor, unsigned char *to, size_t n)
{
	struct delta_cursor *c = &d->cursors[cursor];
	ZSTD_outBuffer out = { to, n, 0 };

	while (out.pos < n && !c->done && !d->fault) {
		ZSTD_inBuffer in = { c->input, c->n, c->at };
		size_t before = out.pos, left = ZSTD_decompressStream(c->zstd, &out, &in);
		if (ZSTD_isError(left)) {
			fail_zstd(d, left);
			break;
		}
		bool moved = in.pos != c->at || out.pos != before;
		c->at = in.pos;
		c->done = left == 0;
		if (!moved && !c->done)
			break;
	}
	if (out.pos < n && !c->done && !d->fault && c->at == c->n && c->taken == d->blob_bytes)
		fail(d, DELTA_SHORT);
	return out.pos;
}

static bool wants_any(const struct delta_decoder *d)
{
	return delta_wants(d, 0) || delta_wants(d, 1);
}

static void decode_xor(struct delta_decoder *d, unsigned char *block, size_t n, bool *more_out)
{
	while (d->filled < n && !d->fault) {
		size_t want = num_min(ROOM, n - d->filled), got = pull(d, 0, d->room, want);
		put_xor(block + d->filled, block + d->filled, d->room, got);
		d->filled += got;
		if (got < want && d->cursors[0].done && !d->fault)
			fail(d, DELTA_SHORT);
		if (got < want && !d->fault) {
			*more_out = true;
			return;
		}
	}
}

/* The next `n` bytes of a cursor, out of its piece of the room. NULL: not here yet, or a fault. */
static const unsigned char *next_bytes(struct delta_decoder *d, unsigned cursor, size_t n)
{
	unsigned char *room = d->room + (size_t)cursor * ROOM;
	size_t at = d->pieces[cursor].at, left = d->pieces[cursor].n - at;

	if (left < n) {
		memmove(room, room + at, left);
		left += pull(d, cursor, room + left, ROOM - left);
		d->pieces[cursor].at = at = 0;
		d->pieces[cursor].n = left;
		if (left < n && d->cursors[cursor].done && !d->fault)
			fail(d, DELTA_SHORT);
	}
	if (left < n || d->fault)
		return NULL;
	d->pieces[cursor].at = at + n;
	return room + at;
}

static uint32_t u32_at(const unsigned char *p)
{
	uint32_t v;

	memcpy(&v, p, sizeof v);
	return le32toh(v);
}

static bool read_count(struct delta_decoder *d)
{
	const unsigned char *p = d->has_count ? NULL : next_bytes(d, 0, HEAD);

	if (p) {
		d->has_count = true;
		d->count = u32_at(p);
		d->skip = HEAD + 4 * d->count;
		if (d->count > d->bytes)
			fail(d, DELTA_COUNT);
	}
	return d->has_count && !d->fault;
}

/* The second cursor passes by count and positions. */
static bool skip_positions(struct delta_decoder *d)
{
	while (d->skip) {
		size_t n = (size_t)num_min(d->skip, ROOM / 2);
		if (!next_bytes(d, 1, n))
			return false;
		d->skip -= n;
	}
	return true;
}

static bool read_position(struct delta_decoder *d)
{
	const unsigned char *p = d->has_position ? NULL : next_bytes(d, 0, sizeof d->position);

	if (p) {
		uint32_t position = u32_at(p);
		if (position >= d->bytes || (d->positions && position <= d->position))
			fail(d, DELTA_POSITION);
		d->position = position;
		d->positions++;
		d->has_position = true;
	}
	return d->has_position && !d->fault;
}

static void overwrite(struct delta_decoder *d, uint64_t at, unsigned char *block, size_t n, bool *more_out)
{
	*more_out = true; /* wherever this returns early without a fault */
	if (!read_count(d) || !skip_positions(d))
		return;
	while (d->values < d->count) {
		if (!read_position(d))
			return;
		if (d->position >= at + n)
			break;
		const unsigned char *value = next_bytes(d, 1, 1);
		if (!value)
			return;
		block[d->position - at] = *value;
		d->has_position = false;
		d->values++;
	}
	*more_out = false;
}

void delta_decode(struct delta_decoder *d, uint64_t at, unsigned char *block, size_t n, bool *more_out)
{
	*more_out = false;
	if (d->encoding == DELTA_XOR)
		decode_xor(d, block, n, more_out);
	else
		overwrite(d, at, block, n, more_out);
	if (d->fault)
		*more_out = false;
	if (!*more_out)
		d->filled = 0;
	must(!*more_out || wants_any(d));
}

void delta_decode_end(struct delta_decoder *d, bool *more_out)
{
	unsigned cursor = d->encoding == DELTA_OVERWRITE; /* the one that sees the frame's last bytes */
	struct delta_cursor *c = &d->cursors[cursor];
	unsigned char byte;

	*more_out = false;
	if (d->encoding == DELTA_OVERWRITE && (!read_count(d) || !skip_positions(d))) {
		*more_out = !d->fault;
		return;
	}
	if (d->encoding == DELTA_OVERWRITE && !d->fault && d->pieces[1].at < d->pieces[1].n)
		fail(d, DELTA_LONG);
	if (!d->fault && pull(d, cursor, &byte, 1))
		fail(d, DELTA_LONG);
	if (!d->fault && !c->done) {
		*more_out = true;
		return;
	}
	if (!d->fault && (c->at < c->n || c->taken < d->blob_bytes))
		fail(d, DELTA_TRAILING);
}
