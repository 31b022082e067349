/* str.c: see str.h. */
#include "base/str.h"

#include <stdatomic.h>
#include <sys/random.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

int str_cmp(struct str a, struct str b)
{
	size_t n = a.n < b.n ? a.n : b.n;
	int c = n ? memcmp(a.p, b.p, n) : 0;

	if (c != 0)
		return c;
	return a.n < b.n ? -1 : a.n > b.n;
}

/* Digits from `at` on without leading zeros. */
static struct str number_at(struct str s, size_t *at)
{
	size_t begin, end = *at;

	while (end < s.n && s.p[end] >= '0' && s.p[end] <= '9')
		end++;
	for (begin = *at; begin + 1 < end && s.p[begin] == '0';)
		begin++;
	*at = end;
	return (struct str){ s.p + begin, end - begin };
}

int str_cmp_natural(struct str a, struct str b)
{
	size_t i = 0, k = 0;

	while (i < a.n && k < b.n) {
		struct str x = number_at(a, &i), y = number_at(b, &k);
		int c = 0;
		if (x.n && y.n)
			c = x.n != y.n ? (x.n < y.n ? -1 : 1) : str_cmp(x, y);
		else if (x.n || y.n) /* a number against something else: by their first bytes */
			c = (x.n ? '0' : (unsigned char)a.p[i]) < (y.n ? '0' : (unsigned char)b.p[k]) ? -1 : 1;
		else if (a.p[i++] != b.p[k++])
			c = (unsigned char)a.p[i - 1] < (unsigned char)b.p[k - 1] ? -1 : 1;
		if (c)
			return c;
	}
	if (i < a.n || k < b.n)
		return i < a.n ? 1 : -1;
	return str_cmp(a, b);
}

/* Chosen once in a process, by whichever thread is first: a table that one thread fills, another one may read. */
static uint64_t seed_of_process(void)
{
	static _Atomic uint64_t chosen;
	uint64_t seed = atomic_load_explicit(&chosen, memory_order_relaxed), mine = 0;

	if (seed)
		return seed;
	if (getrandom(&mine, sizeof mine, GRND_NONBLOCK) != (ssize_t)sizeof mine || mine == 0)
		mine = (uint64_t)(uintptr_t)&chosen;
	return atomic_compare_exchange_strong(&chosen, &seed, mine) ? mine : seed;
}

uint64_t str_hash(struct str s)
{
	return XXH3_64bits_withSeed(s.p, s.n, seed_of_process());
}

/* Greedy match with one point of return: the latest star. Linear in practice, |pattern| * |s| at worst, no recursion. */
bool str_glob(struct str pattern, struct str s)
{
	size_t i = 0, j = 0, star = SIZE_MAX, mark = 0;

	while (i < s.n) {
		if (j < pattern.n && pattern.p[j] == '*') {
			star = j++;
			mark = i;
		} else if (j < pattern.n && pattern.p[j] == s.p[i]) {
			i++;
			j++;
		} else if (star != SIZE_MAX) {
			j = star + 1;
			i = ++mark;
		} else {
			return false;
		}
	}
	while (j < pattern.n && pattern.p[j] == '*')
		j++;
	return j == pattern.n;
}

bool strs_match(const struct strs *globs, struct str s)
{
	for (size_t i = 0; i < globs->n; i++)
		if (str_glob(globs->v[i], s))
			return true;
	return false;
}

static bool is_utf8(struct str s, bool surrogates)
{
	const unsigned char *p = (const unsigned char *)s.p;

	for (size_t i = 0; i < s.n;) {
		unsigned c = p[i];
		if (c < 0x80) {
			i++;
			continue;
		}
		size_t more = c < 0xC2 ? 9 : c < 0xE0 ? 1 : c < 0xF0 ? 2 : c < 0xF5 ? 3 : 9;
		if (more == 9 || more >= s.n - i)
			return false;
		for (size_t k = 1; k <= more; k++)
			if ((p[i + k] & 0xC0) != 0x80)
				return false;
		if ((c == 0xE0 && p[i + 1] < 0xA0) || (c == 0xED && p[i + 1] > 0x9F && !surrogates) ||
		    (c == 0xF0 && p[i + 1] < 0x90) || (c == 0xF4 && p[i + 1] > 0x8F))
			return false;
		i += more + 1;
	}
	return true;
}

bool str_utf8(struct str s)
{
	return is_utf8(s, false);
}

bool str_utf8_surrogates(struct str s)
{
	return is_utf8(s, true);
}

size_t str_put_utf8(char out[4], uint32_t c)
{
	static const unsigned char lead[] = { 0, 0, 0xC0, 0xE0, 0xF0 };
	size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;

	for (size_t i = n; i-- > 1; c >>= 6)
		out[i] = (char)(0x80 | (c & 0x3F));
	out[0] = (char)(lead[n] | c);
	return n;
}

int64_t str_hex(struct str s, size_t digits)
{
	int64_t v = 0;

	if (s.n < digits)
		return -1;
	for (size_t i = 0; i < digits; i++) {
		char c = s.p[i], low = (char)(c | 0x20);
		int d = c >= '0' && c <= '9' ? c - '0' : low >= 'a' && low <= 'f' ? low - 'a' + 10 : -1;
		if (d < 0)
			return -1;
		v = v << 4 | d;
	}
	return v;
}

bool str_to_u64(struct str s, uint64_t *out)
{
	uint64_t v = 0;

	if (s.n == 0)
		return false;
	for (size_t i = 0; i < s.n; i++) {
		unsigned d = (unsigned)(s.p[i] - '0');
		if (d > 9 || __builtin_mul_overflow(v, 10u, &v) || __builtin_add_overflow(v, d, &v))
			return false;
	}
	*out = v;
	return true;
}

bool str_to_ms(struct str s, int64_t *out)
{
	static const struct {
		const char *unit;
		int64_t ms;
	} units[] = { { "ms", 1 }, { "s", 1000 }, { "m", 60000 }, { "h", 3600000 }, { "d", 86400000 } };
	uint64_t number;
	size_t n = 0;

	while (n < s.n && s.p[n] >= '0' && s.p[n] <= '9')
		n++;
	if (!str_to_u64((struct str){ s.p, n }, &number))
		return false;
	for (size_t i = 0; i < sizeof units / sizeof *units; i++)
		if (str_is((struct str){ s.p + n, s.n - n }, units[i].unit) && number <= (uint64_t)(STR_MS_MAX / units[i].ms)) {
			*out = (int64_t)number * units[i].ms;
			return true;
		}
	return false;
}
