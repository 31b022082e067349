/* problems.c: see problems.h. */
#include "plan/problems.h"

#include "base/buf.h"
#include "base/num.h"

enum { TEXT_SHOWN = 900, FQN_SHOWN = 500 };

void problems_free(struct problems *p)
{
	vec_free(&p->list);
}

static bool is_of_a_key(enum err e)
{
	switch (e) {
	case ERR_MISSING_KEY:
	case ERR_SIZE_MISMATCH:
	case ERR_KIND_MISMATCH:
	case ERR_COVERAGE_HOLE:
	case ERR_DTYPE_UNSUPPORTED:
	case ERR_LAYOUT_INVALID:
	case ERR_PLAN_INVALID:
		return err_last()->fqn[0] != '\0';
	default:
		return false;
	}
}

enum err problems_note(struct problems *p, enum err e)
{
	const struct err_info *was = err_last();
	struct problem *x;

	if (!e || was->code != e || !is_of_a_key(e))
		return e;
	p->count++;
	if (p->list.n >= PROBLEMS_KEPT)
		return OK;
	TRY(vec_push(&p->list, &x));
	*x = (struct problem){ .code = e, .rank = was->rank };
	TRY(arena_str(p->arena, str_of(was->fqn), &x->fqn));
	TRY(arena_str(p->arena, str_of(was->text), &x->text));
	TRY(arena_str(p->arena, str_of(was->expected), &x->expected));
	return arena_str(p->arena, str_of(was->actual), &x->actual);
}

/* Adds a text if there is room; the first is always there. */
static bool put(struct buf *b, const char *between, struct str s)
{
	if (b->len && s.n + 3 > TEXT_SHOWN - num_min(b->len, TEXT_SHOWN))
		return false;
	buf_printf(b, "%s%.*s", b->len ? between : "", (int)num_min(s.n, TEXT_SHOWN), s.p);
	return true;
}

/* Missing keys share one sentence. */
static void put_missing(struct buf *b, const struct problems *p, uint64_t *shown)
{
	uint64_t n = 0;

	for (uint64_t i = 0; i < p->list.n; i++)
		n += p->list.v[i].code == ERR_MISSING_KEY;
	if (n == 0)
		return;
	buf_printf(b, "Missing key%s in checkpoint state_dict: ", n > 1 ? "s" : "");
	n = 0;
	for (uint64_t i = 0; i < p->list.n; i++) {
		struct str fqn = p->list.v[i].fqn;
		if (p->list.v[i].code != ERR_MISSING_KEY)
			continue;
		if (n && fqn.n + 3 > TEXT_SHOWN - num_min(b->len, TEXT_SHOWN))
			return;
		buf_printf(b, "%s%.*s", n++ ? ", " : "", (int)num_min(fqn.n, FQN_SHOWN), fqn.p);
		++*shown;
	}
}

enum err problems_raise(const struct problems *p)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(4 * TEXT_SHOWN);
	uint64_t shown = 0;

	if (p->count == 0)
		return OK;
	const struct problem *first = &p->list.v[0];
	put_missing(&b, p, &shown);
	for (uint64_t i = 0; i < p->list.n; i++) {
		if (p->list.v[i].code == ERR_MISSING_KEY)
			continue;
		if (!put(&b, "; ", p->list.v[i].text))
			break;
		shown++;
	}
	if (shown < p->count)
		buf_printf(&b, " and %ju more", (uintmax_t)(p->count - shown));
	TRY(buf_status(&b));
	err_record(first->code, 0, ERR_PLACE, "%.*s", (int)b.len, (const char *)b.p);
	if (first->rank >= 0)
		(void)err_at_rank(first->code, first->rank);
	return err_expected(err_at_fqn(first->code, first->fqn.p, first->fqn.n), first->expected.n ? first->expected.p : NULL,
			    first->actual.n ? first->actual.p : NULL);
}
