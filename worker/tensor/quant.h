/* quant.h: ggml's block type Q8_0: 32 elements as a float16 scale and an int8 each. Bit for bit as quantize_row_q8_0_ref of ggml-quants.c
 * and gguf-py do it: scale = max |x| / 127, elements rounded half away from zero. Of a block with NaN or infinities the elements are 0. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { QUANT_Q8_0_FLOATS = 32, QUANT_Q8_0_BYTES = 34 };

/* The elements of `blocks` blocks, as gguf-py's dequantize gives them: each int8 times the scale. */
void quant_q8_0_floats(float *to, const unsigned char *from, uint64_t blocks);

/* Quantises as many blocks of `from` as the bytes [skip, skip + bytes) of their blocks touch, and writes only those bytes to `to`. */
void quant_q8_0_part(unsigned char *to, const float *from, uint32_t skip, uint64_t bytes);
