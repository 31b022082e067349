/* spec_sdops.c: requests for operations on state dicts in shared memory, a function per kind as in spec.c.
 *
 * What all of them have in common is checked by common(); whether a rank lies in the group is checked here as far as the request
 * says how large the group is, else when the state dict is known (server/job_sdop.c). */
#include "spec/layout_rules.h"
#include "spec/spec_own.h"

#define ALL_KINDS "kind", "labels", "options", "group", "device", "type_check", "backend"
#define MOVING_KINDS ALL_KINDS, "source", "target"

/* A list of ranks, each once and below `end`. */
static FALLIBLE enum err check_ranks(const struct jval *doc, const char *key, int64_t end, size_t *count_out)
{
	struct jval list = jval_get(doc, key);
	unsigned char seen[LAYOUT_WORLD_MAX / 8] = { 0 };

	*count_out = 0;
	if (!list.j)
		return spec_put_default(doc->j, key, json_array());
	TRY(jval_array(&list, LAYOUT_WORLD_MAX, count_out));
	for (size_t i = 0; i < *count_out; i++) {
		struct jval v = jval_at(&list, i);
		int64_t rank = 0;
		TRY(jval_integer(&v, 0, end - 1, &rank));
		if (seen[rank / 8] & 1u << rank % 8)
			return jval_fail(&v, ERR_VALIDATION_FAILED, "rank %jd is listed twice", (intmax_t)rank);
		seen[rank / 8] |= (unsigned char)(1u << rank % 8);
	}
	return OK;
}

/* *members_out: how many ranks the group has; LAYOUT_WORLD_MAX when it is the whole world, whose size is not known here. */
static FALLIBLE enum err common(const struct jval *doc, int64_t *members_out)
{
	static const char *const devices[] = { "cpu", "cuda", NULL }, *const backends[] = { "auto", "shm", "tcp", "nccl", NULL };
	size_t device = 0, backend = 0, n = 0;
	bool type_check = true;

	TRY(check_ranks(doc, "group", LAYOUT_WORLD_MAX, &n));
	*members_out = n ? (int64_t)n : LAYOUT_WORLD_MAX;
	TRY(jval_opt_word(doc, "device", devices, &device));
	TRY(jval_opt_word(doc, "backend", backends, &backend));
	TRY(jval_opt_bool(doc, "type_check", &type_check));
	TRY(spec_put_default(doc->j, "device", json_string(devices[device])));
	TRY(spec_put_default(doc->j, "backend", json_string(backends[backend])));
	TRY(spec_put_default(doc->j, "type_check", json_boolean(type_check)));
	return spec_check_options(doc, (const char *const[]){ "retries", NULL });
}

static FALLIBLE enum err read_dict(const struct jval *v, const char *const *more, struct ref *out)
{
	int64_t generation = 0;

	TRY(ref_read(v, REF_STATE_DICT, more, out));
	return jval_opt_integer(v, "generation", 0, INT64_MAX, &generation);
}

/* Whence and where to. The target may be the source itself: the result is its next generation. */
static FALLIBLE enum err ends(const struct jval *doc, const char *const *of_target, struct spec *s, int64_t *members_out)
{
	struct jval source = jval_get(doc, "source"), target = jval_get(doc, "target");

	TRY(read_dict(&source, (const char *const[]){ "generation", NULL }, &s->source));
	TRY(ref_read(&target, REF_STATE_DICT, of_target, &s->target));
	return common(doc, members_out);
}

static FALLIBLE enum err flag(const struct jval *doc, const char *key, bool value)
{
	TRY(jval_opt_bool(doc, key, &value));
	return spec_put_default(doc->j, key, json_boolean(value));
}

FALLIBLE enum err spec_check_create(const struct jval *doc, struct spec *s)
{
	int64_t members = 0;

	TRY(jval_only(doc, (const char *const[]){ MOVING_KINDS, "share_memory", "pin_memory", NULL }));
	TRY(ends(doc, NULL, s, &members));
	TRY(flag(doc, "share_memory", true));
	return flag(doc, "pin_memory", false);
}

FALLIBLE enum err spec_check_copy(const struct jval *doc, struct spec *s)
{
	int64_t members = 0;

	struct jval target = jval_get(doc, "target");

	TRY(jval_only(doc, (const char *const[]){ MOVING_KINDS, NULL }));
	TRY(ends(doc, NULL, s, &members));
	return str_eq(s->source.name, s->target.name) ? jval_fail(&target, ERR_VALIDATION_FAILED, "is the source itself") : OK;
}

FALLIBLE enum err spec_check_offload(const struct jval *doc, struct spec *s)
{
	int64_t members = 0;
	size_t n = 0;

	TRY(jval_only(doc, (const char *const[]){ MOVING_KINDS, "ranks_only", NULL }));
	TRY(ends(doc, NULL, s, &members));
	return check_ranks(doc, "ranks_only", members, &n);
}

FALLIBLE enum err spec_check_gather(const struct jval *doc, struct spec *s)
{
	int64_t members = 0;
	size_t n = 0;

	TRY(jval_only(doc, (const char *const[]){ MOVING_KINDS, "ranks_only", "cpu_offload", NULL }));
	TRY(ends(doc, NULL, s, &members));
	TRY(flag(doc, "cpu_offload", false));
	return check_ranks(doc, "ranks_only", members, &n);
}

/* "layout" and, for a new target, its world size. A broadcast without a layout cuts nothing. */
static FALLIBLE enum err check_cut(const struct jval *doc, bool always)
{
	struct jval layout = jval_get(doc, "layout"), target = jval_get(doc, "target");
	int64_t world = 0;

	TRY(jval_opt_integer(&target, "world_size", 1, LAYOUT_WORLD_MAX, &world));
	TRY(layout_rules_check_in_memory(&layout, &world));
	if (always)
		TRY(spec_put_default(doc->j, "layout", json_array()));
	return world > 0 ? spec_put_default(target.j, "world_size", json_integer(world)) : OK;
}

FALLIBLE enum err spec_check_broadcast(const struct jval *doc, struct spec *s)
{
	int64_t members = 0, root = 0;

	TRY(jval_only(doc, (const char *const[]){ MOVING_KINDS, "root", "strict", "cpu_offload", "layout", NULL }));
	TRY(ends(doc, (const char *const[]){ "world_size", NULL }, s, &members));
	TRY(jval_opt_integer(doc, "root", 0, members - 1, &root));
	TRY(spec_put_default(doc->j, "root", json_integer(root)));
	TRY(flag(doc, "strict", false));
	TRY(flag(doc, "cpu_offload", false));
	return check_cut(doc, false);
}

FALLIBLE enum err spec_check_distribute(const struct jval *doc, struct spec *s)
{
	int64_t members = 0;

	TRY(jval_only(doc, (const char *const[]){ MOVING_KINDS, "layout", NULL }));
	TRY(ends(doc, (const char *const[]){ "world_size", NULL }, s, &members));
	return check_cut(doc, true);
}

FALLIBLE enum err spec_check_redistribute(const struct jval *doc, struct spec *s)
{
	int64_t members = 0;

	TRY(jval_only(doc, (const char *const[]){ MOVING_KINDS, "layout", NULL }));
	TRY(ends(doc, (const char *const[]){ "world_size", NULL }, s, &members));
	return check_cut(doc, true);
}

FALLIBLE enum err spec_check_compare(const struct jval *doc, struct spec *s)
{
	static const char *const tolerances[] = { "rtol", "atol" };
	struct jval a = jval_get(doc, "a"), b = jval_get(doc, "b");
	int64_t members = 0;

	TRY(jval_only(doc, (const char *const[]){ ALL_KINDS, "a", "b", "values", "rtol", "atol", NULL }));
	TRY(read_dict(&a, (const char *const[]){ "generation", NULL }, &s->a));
	TRY(read_dict(&b, (const char *const[]){ "generation", NULL }, &s->b));
	TRY(common(doc, &members));
	TRY(flag(doc, "values", false));
	for (size_t i = 0; i < sizeof tolerances / sizeof *tolerances; i++) {
		struct jval v = jval_get(doc, tolerances[i]);
		double tolerance = 0;
		TRY(jval_opt_number(doc, tolerances[i], 0, &tolerance));
		if (tolerance > 0 && !json_is_true(json_object_get(doc->j, "values")))
			return jval_fail(&v, ERR_VALIDATION_FAILED, "is for values: give \"values\":true, too");
		TRY(spec_put_default(doc->j, tolerances[i], json_real(tolerance)));
	}
	return OK;
}
