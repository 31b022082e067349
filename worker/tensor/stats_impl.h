/* stats_impl.h: batches of elements as doubles, which stay in the L1 cache, and sums in lanes, for stats.c and stats_diff.c. */
#pragma once
#include "tensor/stats.h"

enum { BATCH = 512, LANES = 16 };

/* Also compiled for AVX2 and AVX-512, of which the loader picks what the CPU has. Without FMA (fp-contract=off), so that all give the same
 * bits. */
#if defined __x86_64__ && defined __GNUC__ && !defined __clang__ && !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define WIDE
#endif

/* n elements as doubles, and how many doubles those are: of complex ones two each, of float4_e2m1fn_x2 two a byte. */
uint64_t stats_to_double(enum dtype d, const unsigned char *p, uint64_t n, double *out);
bool stats_all_finite(const double *v, uint64_t n);
/* The sum of LANES accumulators, always in the same order. */
double stats_fold(double *lane);
