/* average.c: see average.h. */
#include "tensor/average.h"

#pragma GCC optimize("O3")

#define ADD(T, name)                                                                \
	static void name(T *sum, const T *from, size_t n, T w, bool first) \
	{                                                                           \
		if (first)                                                          \
			for (size_t i = 0; i < n; i++)                              \
				sum[i] = w * from[i];                               \
		else                                                                \
			for (size_t i = 0; i < n; i++)                              \
				sum[i] += w * from[i];                              \
	}
ADD(float, add_float)
ADD(double, add_double)

void average_add(void *sum, const void *from, enum dtype d, size_t n, double weight, bool first)
{
	size_t numbers = dtype_is_complex(d) ? 2 * n : n;

	if (d == DT_FLOAT32 || d == DT_COMPLEX64)
		add_float(sum, from, numbers, (float)weight, first);
	else
		add_double(sum, from, numbers, weight, first);
}
