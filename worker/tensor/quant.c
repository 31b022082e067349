/* quant.c: see quant.h. */
#pragma GCC optimize("O3")

#include "tensor/quant.h"

#include <math.h>
#include <string.h>

#include "tensor/cast.h"

/* Half away from zero, as roundf: x is at most 127, so that the sum is exact but for the largest float below one half. */
static int8_t rounded(float x)
{
	float a = fabsf(x), whole = (float)(int32_t)a;

	whole += a - whole >= 0.5f ? 1.0f : 0.0f;
	return (int8_t)(x < 0 ? -whole : whole);
}

static void quantise_block(unsigned char out[QUANT_Q8_0_BYTES], const float *x)
{
	float most = 0, finite = 0;

	for (int i = 0; i < QUANT_Q8_0_FLOATS; i++) {
		most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
		finite += x[i] * 0.0f; /* NaN, if one is not finite */
	}
	float scale = finite == 0 ? most / 127.0f : finite, inverse = scale > 0 ? 1.0f / scale : 0.0f;
	enum err e = cast_run(out, DT_FLOAT16, &scale, DT_FLOAT32, 1);
	must(!e);
	if (!(finite == 0) || isinf(inverse)) {
		memset(out + 2, 0, QUANT_Q8_0_FLOATS);
		return;
	}
	for (int i = 0; i < QUANT_Q8_0_FLOATS; i++)
		out[2 + i] = (unsigned char)rounded(x[i] * inverse);
}

void quant_q8_0_part(unsigned char *to, const float *from, uint32_t skip, uint64_t bytes)
{
	unsigned char block[QUANT_Q8_0_BYTES];

	for (uint64_t done = 0; done < bytes; from += QUANT_Q8_0_FLOATS, skip = 0) {
		uint64_t n = QUANT_Q8_0_BYTES - skip < bytes - done ? QUANT_Q8_0_BYTES - skip : bytes - done;
		if (n == QUANT_Q8_0_BYTES) {
			quantise_block(to + done, from);
		} else {
			quantise_block(block, from);
			memcpy(to + done, block + skip, n);
		}
		done += n;
	}
}

void quant_q8_0_floats(float *to, const unsigned char *from, uint64_t blocks)
{
	for (; blocks; blocks--, from += QUANT_Q8_0_BYTES, to += QUANT_Q8_0_FLOATS) {
		float scale;
		enum err e = cast_run(&scale, DT_FLOAT32, from, DT_FLOAT16, 1);
		must(!e);
		for (int i = 0; i < QUANT_Q8_0_FLOATS; i++)
			to[i] = (float)(int8_t)from[2 + i] * scale;
	}
}
