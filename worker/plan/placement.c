/* placement.c: reading placements as PyTorch prints them and as people shorten them. */
#include "plan/placement.h"

enum { TEXT_MAX = 64 };

static const char *const reduce_names[] = { "sum", "avg", "min", "max", "product" };

const char *placement_reduce_name(enum reduce_op op)
{
	return reduce_names[op];
}

/* What stands between the parentheses: "0", "dim=0", "-1". */
static bool read_number(struct str s, const char *name, uint64_t max, int64_t *out)
{
	size_t n = strlen(name);
	uint64_t v;
	bool minus;

	if (str_starts(s, name) && s.n > n && s.p[n] == '=')
		s = (struct str){ s.p + n + 1, s.n - n - 1 };
	minus = str_starts(s, "-");
	if (minus)
		s = (struct str){ s.p + 1, s.n - 1 };
	if (!str_to_u64(s, &v) || v > max)
		return false;
	*out = minus ? -(int64_t)v : (int64_t)v;
	return true;
}

static bool read_shard(struct str args, struct placement *out)
{
	int64_t dim;

	if (!read_number(args, "dim", INT32_MAX, &dim))
		return false;
	*out = (struct placement){ .kind = PLACE_SHARD, .dim = (int32_t)dim };
	return true;
}

static bool read_strided(struct str args, struct placement *out)
{
	const char *comma = args.n ? memchr(args.p, ',', args.n) : NULL;
	int64_t dim, sf;

	if (!comma)
		return false;
	struct str a = { args.p, (size_t)(comma - args.p) }, b = { comma + 1, args.n - a.n - 1 };
	if (!read_number(a, "dim", INT32_MAX, &dim))
		return false;
	if (!read_number(b, "sf", INT64_MAX, &sf) && !read_number(b, "split_factor", INT64_MAX, &sf))
		return false;
	*out = (struct placement){ .kind = PLACE_STRIDED_SHARD, .dim = (int32_t)dim, .split_factor = sf };
	return true;
}

/* "", "sum", "'max'", "reduce_op=min". */
static bool read_partial(struct str args, struct placement *out)
{
	static const char word[] = "reduce_op=";

	*out = (struct placement){ .kind = PLACE_PARTIAL };
	if (args.n == 0)
		return true;
	if (str_starts(args, word))
		args = (struct str){ args.p + sizeof word - 1, args.n - (sizeof word - 1) };
	if (args.n >= 2 && (args.p[0] == '\'' || args.p[0] == '"') && args.p[args.n - 1] == args.p[0])
		args = (struct str){ args.p + 1, args.n - 2 };
	for (uint32_t i = 0; i < sizeof reduce_names / sizeof *reduce_names; i++) {
		out->reduce = (enum reduce_op)i;
		if (str_is(args, reduce_names[i]))
			return true;
	}
	return false;
}

static bool read_placement(struct str name, bool has_args, struct str args, struct placement *out)
{
	if (str_is(name, "Shard") || str_is(name, "S"))
		return has_args && read_shard(args, out);
	if (str_is(name, "_StridedShard") || str_is(name, "_S"))
		return has_args && read_strided(args, out);
	if (str_is(name, "Replicate") || str_is(name, "R")) {
		*out = (struct placement){ .kind = PLACE_REPLICATE };
		return args.n == 0;
	}
	if (str_is(name, "Partial") || str_is(name, "P") || str_is(name, "_Partial"))
		return read_partial(args, out);
	return false;
}

enum err placement_parse(struct str text, struct placement *out)
{
	char bare[TEXT_MAX];
	size_t n = 0;

	for (size_t i = 0; i < text.n; i++) {
		if (text.p[i] == ' ' || text.p[i] == '\t')
			continue;
		if (n == sizeof bare)
			return ERR(LAYOUT_INVALID, "a placement is too long: %.40s…", bare);
		bare[n++] = text.p[i];
	}
	struct str s = { bare, n };
	const char *open = memchr(bare, '(', n);
	struct str name = open ? (struct str){ bare, (size_t)(open - bare) } : s, args = { bare, 0 };
	if (open)
		args = (struct str){ open + 1, n - name.n - 1 };
	bool closed = !open || (args.n && args.p[args.n - 1] == ')');
	if (open && args.n)
		args.n--;
	if (!closed || !read_placement(name, open != NULL, args, out))
		return ERR(LAYOUT_INVALID, "'%.*s' is not a placement: Shard(dim), Replicate() …", (int)n, bare);
	if (out->kind == PLACE_STRIDED_SHARD && out->split_factor < 1)
		return ERR(LAYOUT_INVALID, "'%.*s': the split factor must be at least 1", (int)n, bare);
	return OK;
}
