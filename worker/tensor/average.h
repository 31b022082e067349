/* average.h: weighted sums of elements, as a merge of checkpoints makes them. */
#pragma once
#include "tensor/dtype.h"

/* sum[i] = weight * from[i] (first), or sum[i] += weight * from[i]: n elements of float32, float64 or a complex dtype of these; the weight
 * is rounded to their precision. The same as torch's, in this order: sum = w0 * a; sum += w1 * b. Both are aligned. */
void average_add(void *sum, const void *from, enum dtype d, size_t n, double weight, bool first);
