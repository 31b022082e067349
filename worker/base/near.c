/* near.c: see near.h. The distance counts insertions, deletions, exchanges and swaps of neighbours (optimal string alignment). */
#include "base/near.h"

#include <stdio.h>

#include "base/num.h"

struct near near_begin(struct str word)
{
	return (struct near){ .word = word, .distance = NEAR_WORD_MAX };
}

static size_t least(size_t a, size_t b, size_t c)
{
	return a < b ? (a < c ? a : c) : (b < c ? b : c);
}

static size_t distance_of(struct str a, struct str b)
{
	size_t rows[3][NEAR_WORD_MAX + 1]; /* the two lines above and this one */

	for (size_t k = 0; k <= b.n; k++)
		rows[0][k] = k;
	for (size_t i = 1; i <= a.n; i++) {
		size_t *row = rows[i % 3], *above = rows[(i - 1) % 3], *higher = rows[(i + 1) % 3];
		row[0] = i;
		for (size_t k = 1; k <= b.n; k++) {
			row[k] = least(above[k] + 1, row[k - 1] + 1, above[k - 1] + (a.p[i - 1] != b.p[k - 1]));
			if (i > 1 && k > 1 && a.p[i - 1] == b.p[k - 2] && a.p[i - 2] == b.p[k - 1] && higher[k - 2] + 1 < row[k])
				row[k] = higher[k - 2] + 1;
		}
	}
	return rows[a.n % 3][b.n];
}

void near_try(struct near *n, struct str known)
{
	size_t longest = num_max(n->word.n, known.n), distance;

	if (n->word.n == 0 || known.n == 0 || longest >= NEAR_WORD_MAX)
		return;
	if (n->word.n >= 3 && known.n > n->word.n && memcmp(n->word.p, known.p, n->word.n) == 0)
		distance = 1; /* a word that was cut short */
	else
		distance = distance_of(n->word, known);
	if (distance > (longest <= 4 ? 1 : longest <= 8 ? 2 : 3) || distance >= n->distance)
		return;
	n->distance = distance;
	memcpy(n->best, known.p, known.n);
	n->best[known.n] = '\0';
}

static const char *near_found(const struct near *n)
{
	return n->distance < NEAR_WORD_MAX ? n->best : NULL;
}

const char *near_text(const struct near *n, char out[NEAR_HINT_MAX])
{
	out[0] = '\0';
	if (near_found(n))
		snprintf(out, NEAR_HINT_MAX, " (did you mean \"%s\"?)", n->best);
	return out;
}

const char *near_hint(struct str word, const char *const *known, char out[NEAR_HINT_MAX])
{
	struct near n = near_begin(word);

	for (size_t i = 0; known[i]; i++)
		near_try(&n, str_of(known[i]));
	return near_text(&n, out);
}
