/* tensor_sum.c: see tensor_sum.h. Numbers are polynomials over GF(2) modulo ECMA-182's, reflected: bit 63 is x^0. */
#include "io/tensor_sum.h"

#include <isa-l/crc64.h>
#include <pthread.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/num.h"

#define POLYNOMIAL 0xC96C5795D7870F42ull
#define ONE (1ull << 63)

enum { POWERS = 64 + 3 };

static struct {
	uint64_t powers[POWERS];       /* x to the power of 2^k */
	uint64_t behind[8][256];       /* [i][b]: byte b, 8 + i bytes further on */
	bool has_clmul;
} tables;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint64_t times_x(uint64_t a)
{
	return a & 1 ? a >> 1 ^ POLYNOMIAL : a >> 1;
}

/* Bit by bit: about 100 ns. */
static uint64_t multiply_slow(uint64_t a, uint64_t b)
{
	uint64_t product = 0;

	for (uint64_t m = ONE; m; m >>= 1) {
		if (a & m)
			product ^= b;
		b = times_x(b);
	}
	return product;
}

static void make_tables(void)
{
	tables.powers[0] = ONE >> 1;
	for (int k = 1; k < POWERS; k++)
		tables.powers[k] = multiply_slow(tables.powers[k - 1], tables.powers[k - 1]);
	for (unsigned b = 0; b < 256; b++) {
		uint64_t v = b;
		for (int i = 0; i < 8; i++)
			v = times_x(v);
		for (int i = 0; i < 8; i++) {
			tables.behind[i][b] = v;
			for (int k = 0; k < 8; k++)
				v = times_x(v);
		}
	}
#if defined(__x86_64__)
	tables.has_clmul = __builtin_cpu_supports("pclmul");
#endif
}

#if defined(__x86_64__)
/* The product has 127 bits: those of x^64 and above are reduced by table, as a CRC of eight zeros that begins with them. */
__attribute__((target("pclmul,sse4.1"))) static uint64_t multiply_fast(uint64_t a, uint64_t b)
{
	__m128i p = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)a), _mm_cvtsi64_si128((long long)b), 0);
	uint64_t low = (uint64_t)_mm_cvtsi128_si64(p), high = (uint64_t)_mm_extract_epi64(p, 1);
	uint64_t over = low << 1, rest = high << 1 | low >> 63;

	for (int i = 0; i < 8; i++)
		rest ^= tables.behind[7 - i][over >> 8 * i & 0xFF];
	return rest;
}
#endif

static uint64_t multiply(uint64_t a, uint64_t b)
{
#if defined(__x86_64__)
	if (tables.has_clmul)
		return multiply_fast(a, b);
#endif
	return multiply_slow(a, b);
}

/* x to the power of 8 * bytes. */
static uint64_t power(uint64_t bytes)
{
	uint64_t p = ONE;

	for (int k = 3; bytes; k++, bytes >>= 1)
		if (bytes & 1)
			p = multiply(p, tables.powers[k]);
	return p;
}

/* ISA-L inverts on both sides. */
static uint64_t crc(const unsigned char *p, size_t n)
{
	return n ? ~crc64_ecma_refl(~0ull, p, n) : 0;
}

static FALLIBLE enum err place(struct tensor_sum *c, uint32_t ndim, const int64_t *dims, const int64_t *shape, uint32_t item)
{
	uint64_t offset = 0, far;

	c->total = item;
	for (uint32_t d = ndim; d-- > 0;) {
		c->strides[d] = c->total;
		TRY(num_mul(c->total, (uint64_t)shape[d], &c->total));
		TRY(num_mul(c->strides[d], (uint64_t)dims[d], &far));
		TRY(num_add(offset, far, &offset));
	}
	c->start = offset;
	return OK;
}

static uint32_t outer_of(uint32_t ndim, const int64_t *dims, const int64_t *shape, uint32_t item, uint64_t *run)
{
	uint32_t d = ndim;

	for (*run = item; d > 0;) {
		*run *= (uint64_t)dims[ndim + --d];
		if (dims[ndim + d] != shape[d])
			break;
	}
	return d;
}

bool tensor_sum_is_cheap(uint32_t ndim, const int64_t *dims, const int64_t *shape, uint32_t item)
{
	uint64_t run, bytes = item;

	(void)outer_of(ndim, dims, shape, item, &run);
	for (uint32_t d = 0; d < ndim; d++)
		bytes *= (uint64_t)dims[ndim + d];
	return run >= TENSOR_SUM_RUN_MIN || bytes <= TENSOR_SUM_SMALL_BYTES;
}

bool tensor_sum_begin(struct tensor_sum *c, uint32_t ndim, const int64_t *dims, const int64_t *shape, uint32_t item, uint64_t begin)
{
	pthread_once(&once, make_tables);
	*c = (struct tensor_sum){ 0 };
	if (box_empty(ndim, dims + ndim)) /* there is nothing to add, whatever the other sizes are */
		return true;
	if (place(c, ndim, dims, shape, item)) {
		err_clear();
		return false;
	}
	c->outer = outer_of(ndim, dims, shape, item, &c->run);
	uint64_t at = begin / c->run;
	c->in_run = begin % c->run;
	for (uint32_t d = c->outer; d-- > 0;) {
		c->sizes[d] = dims[ndim + d];
		c->at[d] = (int64_t)(at % (uint64_t)c->sizes[d]);
		at /= (uint64_t)c->sizes[d];
		c->start += (uint64_t)c->at[d] * c->strides[d];
	}
	return true;
}

static uint64_t shift(struct tensor_sum *c, uint64_t sum, uint64_t bytes)
{
	if (!sum || !bytes)
		return sum;
	int i = c->delta[0] == bytes ? 0 : c->delta[1] == bytes ? 1 : 2;
	if (i == 2) {
		c->delta[1] = c->delta[0];
		c->factor[1] = c->factor[0];
		c->delta[0] = bytes;
		c->factor[0] = power(bytes);
		i = 0;
	}
	return multiply(sum, c->factor[i]);
}

static void next_run(struct tensor_sum *c)
{
	c->in_run = 0;
	for (uint32_t d = c->outer; d-- > 0;) {
		c->start += c->strides[d];
		if (++c->at[d] < c->sizes[d])
			return;
		c->start -= (uint64_t)c->sizes[d] * c->strides[d];
		c->at[d] = 0;
	}
}

void tensor_sum_add(struct tensor_sum *c, const void *bytes, size_t n)
{
	const unsigned char *p = bytes;

	while (n > 0) {
		size_t part = (size_t)num_min(n, c->run - c->in_run);
		uint64_t end = c->start + c->in_run + part;
		c->sum = shift(c, c->sum, end - c->end) ^ crc(p, part);
		c->end = end;
		c->in_run += part;
		p += part;
		n -= part;
		if (c->in_run == c->run)
			next_run(c);
	}
}

uint64_t tensor_sum_end(const struct tensor_sum *c)
{
	return c->sum ? multiply(c->sum, power(c->total - c->end)) : 0;
}

/* xz's CRC begins with ones and inverts the outcome. */
uint64_t tensor_sum_finish(uint64_t sum, uint64_t tensor_bytes)
{
	pthread_once(&once, make_tables);
	return ~(sum ^ multiply(~0ull, power(tensor_bytes)));
}
