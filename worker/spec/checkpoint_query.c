/* checkpoint_query.c: see checkpoint_query.h. Every number becomes an int64_t in the same order, so that places are compared, and stand in
 * page tokens, without loss. */
#include "spec/checkpoint_query.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/near.h"
#include "base/num.h"

enum form { FORM_GLOB, FORM_TEXT, FORM_VERDICT, FORM_BOOL, FORM_NUMBER, FORM_TIME };
enum { NUMBER_BYTES_MAX = 40, TIME_BYTES_MAX = 32, SHOWN_MAX = 64, TOKEN_BYTES_MAX = 4096 + 64 };

static const struct key_row {
	const char *name;
	enum checkpoint_key key;
	enum form form;
	bool sorts, has_member;
} keys[] = {
	{ "name", KEY_NAME, FORM_GLOB, true, false },
	{ "run", KEY_RUN, FORM_GLOB, false, false },
	{ "format", KEY_FORMAT, FORM_TEXT, false, false },
	{ "content_digest", KEY_DIGEST, FORM_TEXT, false, false },
	{ "verified", KEY_VERIFIED, FORM_VERDICT, false, false },
	{ "held", KEY_HELD, FORM_BOOL, false, false },
	{ "dcpd", KEY_DCPD, FORM_BOOL, false, false },
	{ "step", KEY_STEP, FORM_NUMBER, true, false },
	{ "bytes", KEY_BYTES, FORM_NUMBER, true, false },
	{ "world_size", KEY_WORLD_SIZE, FORM_NUMBER, false, false },
	{ "time", KEY_TIME, FORM_TIME, true, false },
	{ "labels.", KEY_LABEL, FORM_TEXT, false, true },
	{ "metrics.", KEY_METRIC, FORM_NUMBER, true, true },
	{ NULL },
};
static const char *const verdicts[] = { "verified", "damaged", "unverified", "none", NULL };
static const char *const ops[] = { [OP_EQ] = "=", [OP_NE] = "!=", [OP_LT] = "<", [OP_LE] = "<=", [OP_GT] = ">", [OP_GE] = ">=" };

/* ---- reading ---- */

/* The text that is read, and how far. */
struct cursor {
	const char *what;              /* "filter" or "sort" */
	const char *begin, *p, *end;
};

/* Records an error at `at`. shown: the words in question. */
static enum err bad(const struct cursor *c, const char *at, struct str shown, const char *why)
{
	return ERR(VALIDATION_FAILED, "%s, character %zu: \"%.*s\" %s", c->what, (size_t)(at - c->begin) + 1,
		   (int)num_min(shown.n, SHOWN_MAX), shown.p, why);
}

static FALLIBLE enum err find_key(const struct cursor *c, struct str word, bool sorts, const struct key_row **row_out, struct str *member)
{
	struct near near = near_begin(word);
	char why[512], hint[NEAR_HINT_MAX];
	size_t n = (size_t)snprintf(why, sizeof why, "is none of");

	for (const struct key_row *k = keys; k->name; k++) {
		size_t len = strlen(k->name);
		if (sorts && !k->sorts)
			continue;
		near_try(&near, str_of(k->name));
		if (k->has_member ? str_starts(word, k->name) && word.n > len : str_is(word, k->name)) {
			*row_out = k;
			*member = k->has_member ? (struct str){ word.p + len, word.n - len } : STR("");
			return OK;
		}
		n += (size_t)snprintf(why + n, sizeof why - n, "%s %s%s", k == keys ? "" : ",", k->name, k->has_member ? "KEY" : "");
	}
	snprintf(why + n, sizeof why - n, "%s", near_text(&near, hint));
	return bad(c, word.p, word, why);
}

static FALLIBLE enum err read_op(struct cursor *c, struct str key, enum checkpoint_op *out)
{
	struct str rest = { c->p, (size_t)(c->end - c->p) };
	int found = -1;

	for (int i = 0; i < (int)(sizeof ops / sizeof *ops); i++)
		if (str_starts(rest, ops[i]) && (found < 0 || strlen(ops[i]) > strlen(ops[found])))
			found = i;
	if (found < 0)
		return bad(c, key.p, key, "is followed by none of = != < <= > >=");
	*out = (enum checkpoint_op)found;
	c->p += strlen(ops[found]);
	return OK;
}

/* The value, up to " AND " or the end; *more: a term follows. */
static FALLIBLE enum err read_value(struct cursor *c, struct str *out, bool *more)
{
	static const char and[] = " AND ";
	const char *begin = c->p, *from = begin;

	if (from < c->end && *from == '"') {
		const char *quote = memchr(from + 1, '"', (size_t)(c->end - from - 1));
		if (!quote)
			return bad(c, begin, (struct str){ begin, (size_t)(c->end - begin) }, "has no second quote");
		*out = (struct str){ begin + 1, (size_t)(quote - begin - 1) };
		from = quote + 1;
	}
	const char *at = memmem(from, (size_t)(c->end - from), and, sizeof and - 1);
	const char *stop = at ? at : c->end;
	if (from == begin)
		*out = (struct str){ begin, (size_t)(stop - begin) };
	else if (from != stop)
		return bad(c, from, (struct str){ from, (size_t)(stop - from) }, "stands behind a quote: there \" AND \" may follow");
	*more = at;
	c->p = at ? at + sizeof and - 1 : c->end;
	return OK;
}

static FALLIBLE enum err read_number(const struct cursor *c, struct str text, double *out)
{
	char copy[NUMBER_BYTES_MAX + 1], *end = copy;

	if (text.n && text.n <= NUMBER_BYTES_MAX && strchr("+-.0123456789", text.p[0]) && !memchr(text.p, 'x', text.n) &&
	    !memchr(text.p, 'X', text.n)) {
		memcpy(copy, text.p, text.n);
		copy[text.n] = '\0';
		*out = strtod(copy, &end);
		if (end == copy + text.n && isfinite(*out))
			return OK;
	}
	return bad(c, text.p, text, "is no number");
}

static FALLIBLE enum err read_time(const struct cursor *c, struct str text, double *out)
{
	char copy[TIME_BYTES_MAX + 16];
	int64_t ms = 0;

	if (text.n <= TIME_BYTES_MAX) {
		snprintf(copy, sizeof copy, "%.*s%s", (int)text.n, text.p, memchr(text.p, 'T', text.n) ? "" : "T00:00:00Z");
		if (clock_of_text(copy, &ms)) {
			*out = (double)ms;
			return OK;
		}
	}
	return bad(c, text.p, text, "is no time such as 2026-11-23 or 2026-11-23T09:36:08Z");
}

static FALLIBLE enum err read_verdict(const struct cursor *c, struct str text, double *out)
{
	char hint[NEAR_HINT_MAX], why[160];

	for (int i = 0; verdicts[i]; i++)
		if (str_is(text, verdicts[i])) {
			*out = i;
			return OK;
		}
	snprintf(why, sizeof why, "is none of verified, damaged, unverified, none%s", near_hint(text, verdicts, hint));
	return bad(c, text.p, text, why);
}

static FALLIBLE enum err read_form(const struct cursor *c, enum form form, struct checkpoint_term *t)
{
	switch (form) {
	case FORM_NUMBER:
		return read_number(c, t->text, &t->number);
	case FORM_TIME:
		return read_time(c, t->text, &t->number);
	case FORM_VERDICT:
		return read_verdict(c, t->text, &t->number);
	case FORM_BOOL:
		t->number = str_is(t->text, "true");
		return t->number || str_is(t->text, "false") ? OK : bad(c, t->text.p, t->text, "is neither true nor false");
	case FORM_GLOB:
	case FORM_TEXT:
		break;
	}
	return OK;
}

static FALLIBLE enum err read_term(struct cursor *c, struct checkpoint_term *t, bool *more)
{
	const struct key_row *row = NULL;
	struct str key = { c->p, 0 };

	while (c->p < c->end && !strchr("=!<> ", *c->p))
		c->p++;
	key.n = (size_t)(c->p - key.p);
	TRY(find_key(c, key, false, &row, &t->member));
	t->key = row->key;
	const char *op = c->p;
	TRY(read_op(c, key, &t->op));
	if ((row->form <= FORM_VERDICT && t->op > OP_NE) || (row->form == FORM_BOOL && t->op != OP_EQ))
		return bad(c, op, str_of(ops[t->op]),
			   row->form == FORM_BOOL ? "stands where only = can" : "stands where only = and != can");
	TRY(read_value(c, &t->text, more));
	return read_form(c, row->form, t);
}

static FALLIBLE enum err read_sort(struct str text, struct checkpoint_query *out)
{
	struct cursor c = { "sort", text.p, text.p, text.n ? text.p + text.n : text.p };
	const struct key_row *row = NULL;

	if (text.n == 0)
		return OK;
	out->falls = text.p[0] == '-';
	out->sort_mark = (uint32_t)text.n;
	for (size_t i = 0; i < text.n; i++)
		out->sort_mark = (out->sort_mark ^ (unsigned char)text.p[i]) * 16777619u; /* FNV-1a */
	TRY(find_key(&c, (struct str){ text.p + out->falls, text.n - out->falls }, true, &row, &out->sort_member));
	out->sort = row->key;
	return OK;
}

FALLIBLE enum err checkpoint_query_read(struct str filter, struct str sort, struct checkpoint_query *out)
{
	struct cursor c = { "filter", filter.p, filter.p, filter.n ? filter.p + filter.n : filter.p };
	bool more = filter.n > 0;

	*out = (struct checkpoint_query){ .sort = KEY_NAME };
	if (filter.n > CHECKPOINT_QUERY_BYTES || sort.n > CHECKPOINT_QUERY_BYTES)
		return ERR(VALIDATION_FAILED, "%s has more than %d bytes", filter.n > CHECKPOINT_QUERY_BYTES ? "filter" : "sort",
			   CHECKPOINT_QUERY_BYTES);
	if (!str_utf8(filter) || !str_utf8(sort))
		return ERR(VALIDATION_FAILED, "%s is not UTF-8", str_utf8(sort) ? "filter" : "sort");
	while (more) {
		if (out->term_count == CHECKPOINT_QUERY_TERMS)
			return bad(&c, c.p, (struct str){ c.p, (size_t)(c.end - c.p) }, "is one term too many: 16 are possible");
		TRY(read_term(&c, &out->terms[out->term_count++], &more));
	}
	return read_sort(sort, out);
}

/* ---- matching ---- */

static bool holds(enum checkpoint_op op, double a, double b)
{
	switch (op) {
	case OP_EQ:
		return !(a < b) && !(a > b);
	case OP_NE:
		return a < b || a > b;
	case OP_LT:
		return a < b;
	case OP_LE:
		return a <= b;
	case OP_GT:
		return a > b;
	case OP_GE:
		return a >= b;
	}
	return false;
}

static const struct checkpoint_metric *find_metric(const struct checkpoint_facts *f, struct str key)
{
	for (uint32_t i = 0; i < f->metric_count; i++)
		if (str_eq(f->metrics[i].key, key))
			return &f->metrics[i];
	return NULL;
}

static bool has_label(const struct checkpoint_facts *f, struct str key, struct str value)
{
	for (uint32_t i = 0; i < f->label_count; i++)
		if (str_eq(f->labels[i].key, key))
			return str_eq(f->labels[i].value, value);
	return false;
}

static bool matches(const struct checkpoint_term *t, const struct checkpoint_facts *f)
{
	const struct checkpoint_metric *metric;
	bool wanted = t->op == OP_EQ;

	switch (t->key) {
	case KEY_NAME:
		return str_glob(t->text, f->name) == wanted;
	case KEY_RUN:
		return str_glob(t->text, f->run) == wanted;
	case KEY_FORMAT:
		return str_eq(t->text, f->format) == wanted;
	case KEY_DIGEST:
		return str_eq(t->text, f->digest) == wanted;
	case KEY_VERIFIED:
		return str_is(t->text, f->verified[0] ? f->verified : "none") == wanted;
	case KEY_LABEL:
		return has_label(f, t->member, t->text) == wanted;
	case KEY_HELD:
		return f->is_held == (t->number > 0);
	case KEY_DCPD:
		return f->is_dcpd == (t->number > 0);
	case KEY_STEP:
		return f->step >= 0 && holds(t->op, (double)f->step, t->number);
	case KEY_BYTES:
		return holds(t->op, (double)f->bytes, t->number);
	case KEY_WORLD_SIZE:
		return holds(t->op, (double)f->world_size, t->number);
	case KEY_TIME:
		return f->at_ms && holds(t->op, (double)f->at_ms, t->number);
	case KEY_METRIC:
		metric = find_metric(f, t->member);
		return metric && !isnan(metric->value) && holds(t->op, metric->value, t->number);
	}
	return false;
}

bool checkpoint_query_matches(const struct checkpoint_query *q, const struct checkpoint_facts *f)
{
	for (uint32_t i = 0; i < q->term_count; i++)
		if (!matches(&q->terms[i], f))
			return false;
	return true;
}

/* ---- order ---- */

/* The order of doubles is that of their bits as a sign and a magnitude. */
static int64_t ordered(double d)
{
	int64_t bits;

	d += 0.0; /* -0.0 is 0.0 */
	memcpy(&bits, &d, sizeof bits);
	return bits < 0 ? INT64_MIN - bits : bits;
}

struct checkpoint_place checkpoint_query_place(const struct checkpoint_query *q, const struct checkpoint_facts *f)
{
	struct checkpoint_place place = { .is_known = true, .name = f->name };
	const struct checkpoint_metric *metric;

	if (q->sort == KEY_STEP) {
		place.is_known = f->step >= 0;
		place.value = place.is_known ? f->step : 0;
	} else if (q->sort == KEY_BYTES) {
		place.value = (int64_t)num_min(f->bytes, INT64_MAX);
	} else if (q->sort == KEY_TIME) {
		place.value = q->of_run ? f->of_ms : f->at_ms;
		place.is_known = place.value != 0;
		place.step = f->step;
	} else if (q->sort == KEY_METRIC) {
		metric = find_metric(f, q->sort_member);
		place.is_known = metric && !isnan(metric->value);
		place.value = place.is_known ? ordered(metric->value) : 0;
	}
	return place;
}

int checkpoint_query_compare(const struct checkpoint_query *q, const struct checkpoint_place *a, const struct checkpoint_place *b)
{
	int c = num_order(a->value, b->value) ?: num_order(a->step, b->step) ?: str_cmp(a->name, b->name);

	if (a->is_known != b->is_known)
		return a->is_known ? -1 : 1;
	return q->falls ? -c : c;
}

void checkpoint_query_put_token(const struct checkpoint_query *q, const struct checkpoint_place *last, struct buf *out)
{
	buf_printf(out, "%08" PRIx32 ":%c%" PRIx64 ":%" PRIx64 ":", q->sort_mark, last->is_known ? 'k' : 'u', (uint64_t)last->value,
		   (uint64_t)last->step);
	buf_put(out, last->name.p, last->name.n);
}

/* Reads hex digits up to a colon. */
static bool take_hex(struct str *rest, uint64_t *out)
{
	size_t n = 0;

	*out = 0;
	for (; n < rest->n && n < 16 && rest->p[n] != ':'; n++) {
		int64_t digit = str_hex((struct str){ rest->p + n, 1 }, 1);
		if (digit < 0)
			return false;
		*out = *out << 4 | (uint64_t)digit;
	}
	if (n == 0 || n == rest->n || rest->p[n] != ':')
		return false;
	*rest = (struct str){ rest->p + n + 1, rest->n - n - 1 };
	return true;
}

FALLIBLE enum err checkpoint_query_read_token(const struct checkpoint_query *q, struct str token, struct checkpoint_place *out)
{
	uint64_t mark, value, step;
	struct str rest = token;

	if (token.n <= TOKEN_BYTES_MAX && take_hex(&rest, &mark) && mark == q->sort_mark && rest.n && (*rest.p == 'k' || *rest.p == 'u')) {
		out->is_known = *rest.p == 'k';
		rest = (struct str){ rest.p + 1, rest.n - 1 };
		if (take_hex(&rest, &value) && take_hex(&rest, &step)) {
			out->value = (int64_t)value;
			out->step = (int64_t)step;
			out->name = rest;
			return OK;
		}
	}
	return ERR(INVALID_REQUEST, "the query's \"page_token\" is none of ours, or of a list in another order");
}
