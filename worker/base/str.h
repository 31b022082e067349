/* str.h: a counted byte string that owns nothing. FQNs are bytes: they may hold a NUL or bytes that are not UTF-8. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct str {
	const char *p;
	size_t n;
};

struct strs {
	struct str *v;
	size_t n;
};

#define STR(literal) ((struct str){ (literal), sizeof(literal) - 1 })

static inline struct str str_of(const char *z) { return (struct str){ z, strlen(z) }; }
static inline bool str_eq(struct str a, struct str b)
{
	return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}
static inline bool str_is(struct str a, const char *z) { return str_eq(a, str_of(z)); }
static inline bool str_starts(struct str a, const char *z)
{
	size_t n = strlen(z);
	return a.n >= n && (n == 0 || memcmp(a.p, z, n) == 0);
}
static inline bool str_ends(struct str a, const char *z)
{
	size_t n = strlen(z);
	return a.n >= n && (n == 0 || memcmp(a.p + a.n - n, z, n) == 0);
}
int str_cmp(struct str a, struct str b);                   /* byte order, as memcmp */
int str_cmp_natural(struct str a, struct str b);           /* numbers by value: step-2 < step-10; equal ones as str_cmp */
/* XXH3 with a seed of this process: whoever chooses keys cannot make them collide. Never stored, never sent. */
uint64_t str_hash(struct str s);
bool str_glob(struct str pattern, struct str s);           /* `*` matches any run of bytes; linear time */
bool strs_match(const struct strs *globs, struct str s);      /* any of them */
bool str_utf8(struct str s);                               /* well-formed UTF-8? */
bool str_utf8_surrogates(struct str s);                    /* … or with surrogates, as Python's surrogatepass takes it */
size_t str_put_utf8(char out[4], uint32_t c);              /* its bytes; returns their number */
int64_t str_hex(struct str s, size_t digits);              /* its first digits, of either case; -1 if they are not there */
bool str_to_u64(struct str s, uint64_t *out);              /* decimal digits only, no sign, no overflow */
#define STR_MS_MAX (100000000 * INT64_C(86400000))
bool str_to_ms(struct str s, int64_t *out);                /* "500ms", "30s", "10m", "24h", "30d"; at most STR_MS_MAX */
