/* fuzz_delta.c: any bytes as a delta's index, and as the frame of a tensor. A frame that is accepted makes the same tensor of the base in
 * blocks of any size, and what was made of the base is encoded and decoded again.
 *
 * Byte 0: the encoding (bit 0), the block (bits 1 to 7); bytes 1 and 2: bytes of the tensor; then the frame, or the index. */
#include <string.h>

#include "format/delta.h"

enum { TENSOR_MAX = 65535, FRAME_MAX = 2 << 20 };

struct frame {
	const uint8_t *p;
	size_t n;
};

static void feed(struct delta_decoder *d, struct frame f)
{
	for (unsigned i = 0; i < DELTA_CURSORS; i++) {
		size_t want = delta_wants(d, i);
		must(want <= f.n - d->cursors[i].taken);
		memcpy(d->cursors[i].input, f.p + d->cursors[i].taken, want);
		delta_took(d, i, want);
	}
}

static enum delta_fault decode(enum delta_encoding encoding, struct frame f, size_t n, size_t block, unsigned char *tensor)
{
	struct delta_decoder d;
	bool more = false;

	must(delta_decoder_open(&d) == OK);
	delta_decode_begin(&d, encoding, n, f.n);
	for (size_t at = 0; at < n && !d.fault; at += block)
		do {
			delta_decode(&d, at, tensor + at, n - at < block ? n - at : block, &more);
			if (more)
				feed(&d, f);
		} while (more);
	for (more = !d.fault; more;) {
		delta_decode_end(&d, &more);
		if (more)
			feed(&d, f);
	}
	delta_decoder_free(&d);
	return d.fault;
}

static struct frame encode(enum delta_encoding encoding, const unsigned char *base, const unsigned char *now, size_t n, unsigned char *room)
{
	struct delta_out to = { room, 0, FRAME_MAX };
	struct delta_encoder *e;
	bool more;

	must(delta_encoder_new(&e) == OK);
	must(delta_encode_begin(e, encoding, n, delta_count(base, now, n)) == OK);
	for (unsigned pass = 0; pass <= (encoding == DELTA_OVERWRITE); pass++)
		must(delta_encode(e, pass, 0, base, now, n, &to, &more) == OK && !more);
	must(delta_encode_end(e, &to, &more) == OK && !more);
	delta_encoder_free(e);
	return (struct frame){ room, to.n };
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static unsigned char base[TENSOR_MAX], a[TENSOR_MAX], b[TENSOR_MAX], room[FRAME_MAX];
	struct delta_index index;

	if (n < 3)
		return 0;
	enum delta_encoding encoding = data[0] & 1 ? DELTA_OVERWRITE : DELTA_XOR;
	size_t block = 1 + (size_t)(data[0] >> 1) * 13, bytes = (size_t)data[1] | (size_t)data[2] << 8;
	struct frame f = { data + 3, n - 3 };
	struct arena *arena = arena_new(UINT64_MAX);
	if (arena && delta_index_read((struct str){ (const char *)f.p, f.n }, arena, &index) == OK)
		must(index.encoding == DELTA_XOR || index.encoding == DELTA_OVERWRITE);
	if (arena)
		vec_free(&index.values);
	(void)delta_index_is(f.p, f.n);
	arena_free(arena);
	for (size_t i = 0; i < TENSOR_MAX; i++)
		base[i] = a[i] = b[i] = (unsigned char)(i * 7);
	enum delta_fault fault = decode(encoding, f, bytes, block, a);
	must(decode(encoding, f, bytes, bytes + 1, b) == fault);
	if (fault)
		return 0;
	must(memcmp(a, b, bytes) == 0);
	struct frame again = encode(encoding, base, a, bytes, room);
	memcpy(b, base, bytes);
	must(decode(encoding, again, bytes, block, b) == DELTA_FINE && memcmp(a, b, bytes) == 0);
	return 0;
}
