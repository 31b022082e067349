/* layout_rules.c: see layout_rules.h.
 *
 * The worker checks rules against tensors; here is what is wrong whatever the tensors are, so that a request with a bad layout is
 * answered at once with the field's place and never becomes a job. */
#include "spec/layout_rules.h"

#include "spec/ref.h"
#include "base/num.h"
#include "tensor/placement.h"

FALLIBLE enum err layout_rules_placement(struct str text, bool in_memory)
{
	struct placement p;

	TRY(placement_parse(text, &p));
	if (p.kind == PLACE_PARTIAL && !in_memory)
		return ERR(LAYOUT_INVALID, "Any checkpointing related operations are not supported for DTensor with partial placements: "
			   "%.*s has to be reduced first", (int)num_min(text.n, 64), text.p);
	return OK;
}

static FALLIBLE enum err check_ranks(const struct jval *v, int64_t world, bool once, size_t *count_out)
{
	int64_t top = world > 0 ? world : SPEC_WORLD_MAX, rank = 0;

	TRY(jval_array(v, SPEC_WORLD_MAX, count_out));
	CLEANUP(buf_free) struct buf seen = BUF_INIT(SPEC_WORLD_MAX);
	buf_fill(&seen, 0, SPEC_WORLD_MAX);
	TRY(buf_status(&seen));
	for (size_t i = 0; i < *count_out; i++) {
		struct jval item = jval_at(v, i);
		TRY(jval_integer(&item, 0, SPEC_WORLD_MAX - 1, &rank));
		if (rank >= top)
			return jval_fail(&item, ERR_WORLD_MISMATCH, "rank %jd is not in a world of %jd",
					 (intmax_t)rank, (intmax_t)top);
		if (once && seen.p[rank]++)
			return jval_fail(&item, ERR_LAYOUT_INVALID, "rank %jd is listed twice", (intmax_t)rank);
	}
	return OK;
}

static FALLIBLE enum err check_placements(const struct jval *rule, size_t mesh_dims, bool in_memory)
{
	struct jval list = jval_get(rule, "placements");
	size_t n = 0;

	TRY(jval_array(&list, LAYOUT_MESH_DIMS_MAX, &n));
	for (size_t i = 0; i < n; i++) {
		struct jval v = jval_at(&list, i);
		struct str text;
		TRY(jval_string(&v, &text));
		if (layout_rules_placement(text, in_memory) != OK) {
			char why[ERR_TEXT_MAX];
			memcpy(why, err_last()->text, sizeof why);
			return jval_fail(&v, ERR_LAYOUT_INVALID, "%s", why);
		}
	}
	if (n != mesh_dims)
		return jval_fail(&list, ERR_LAYOUT_INVALID, "%zu placements for a mesh of %zu dims", n, mesh_dims);
	return OK;
}

/* *fixed: the world size that earlier rules' meshes ask for, 0 if none did. */
/* "dim_names": one per mesh dim, each once, as DeviceMesh wants them. */
static FALLIBLE enum err check_names(const struct jval *rule, size_t dims)
{
	struct jval names = jval_get(rule, "dim_names");
	size_t named = 0;

	if (!names.j)
		return OK;
	TRY(jval_opt_texts(rule, "dim_names", LAYOUT_MESH_DIMS_MAX, 64));
	TRY(jval_array(&names, LAYOUT_MESH_DIMS_MAX, &named));
	if (named != dims)
		return jval_fail(&names, ERR_LAYOUT_INVALID, "%zu names for %zu dims", named, dims);
	for (size_t i = 0; i < named; i++) {
		struct jval v = jval_at(&names, i);
		for (size_t k = 0; k < i; k++)
			if (json_equal(v.j, json_array_get(names.j, k)))
				return jval_fail(&v, ERR_LAYOUT_INVALID, "Each mesh_dim_name must be unique");
	}
	return OK;
}

/* The world of the rules checked so far: given by the request (0: not given), product of the meshes (0: none yet). */
struct world {
	int64_t size, fixed;
	bool in_memory;
};

static FALLIBLE enum err check_mesh_rule(const struct jval *rule, struct world *w)
{
	struct jval mesh = jval_get(rule, "mesh"), ranks = jval_get(rule, "ranks");
	size_t dims = 1, listed = 0;
	int64_t product = 1, size = 0, world = w->size;

	TRY(jval_only(rule, (const char *const[]){ "match", "optional", "mesh", "placements", "ranks", "dim_names", NULL }));
	if (mesh.j) {
		TRY(jval_array(&mesh, LAYOUT_MESH_DIMS_MAX, &dims));
		if (dims == 0)
			return jval_fail(&mesh, ERR_LAYOUT_INVALID, "a mesh has at least one dim");
		for (size_t i = 0; i < dims; i++) {
			struct jval v = jval_at(&mesh, i);
			TRY(jval_integer(&v, 1, SPEC_WORLD_MAX, &size));
			product *= size;
			if (product > SPEC_WORLD_MAX)
				return jval_fail(&mesh, ERR_WORLD_MISMATCH, "has more than %d ranks",
						 SPEC_WORLD_MAX);
		}
	}
	TRY(check_placements(rule, dims, w->in_memory));
	TRY(check_names(rule, dims));
	if (ranks.j) {
		TRY(check_ranks(&ranks, world, true, &listed));
		if (!mesh.j)
			product = (int64_t)listed;
		if ((int64_t)listed != product || listed == 0)
			return jval_fail(&ranks, ERR_WORLD_MISMATCH, "%zu ranks for a mesh of %jd", listed,
					 (intmax_t)product);
		if (world == 0)
			for (size_t i = 0; i < listed; i++) {
				struct jval v = jval_at(&ranks, i);
				if (json_integer_value(v.j) >= product)
					return jval_fail(&v, ERR_WORLD_MISMATCH,
							 "is beyond the mesh's product %jd: give world_size",
							 (intmax_t)product);
			}
	} else if (!mesh.j) {
		return OK;
	} else if (world > 0 && product != world) {
		return jval_fail(&mesh, ERR_WORLD_MISMATCH, "the mesh has %jd ranks, the world %jd",
				 (intmax_t)product, (intmax_t)world);
	}
	if (world == 0 && w->fixed > 0 && w->fixed != product)
		return jval_fail(mesh.j ? &mesh : &ranks, ERR_WORLD_MISMATCH,
				 "asks for %jd ranks, an earlier rule for %jd: give world_size", (intmax_t)product,
				 (intmax_t)w->fixed);
	w->fixed = product;
	return OK;
}

static FALLIBLE enum err check_dims(const struct jval *object, const char *key, size_t *n_out)
{
	struct jval list = jval_get(object, key);
	int64_t n = 0;

	TRY(jval_array(&list, 64, n_out));
	for (size_t i = 0; i < *n_out; i++) {
		struct jval v = jval_at(&list, i);
		TRY(jval_integer(&v, 0, INT64_MAX, &n));
	}
	return OK;
}

static FALLIBLE enum err check_boxes(const struct jval *boxes, int64_t world)
{
	size_t n = 0, offsets = 0, sizes = 0;
	int64_t rank = 0, top = world > 0 ? world : SPEC_WORLD_MAX;

	TRY(jval_array(boxes, SPEC_WORLD_MAX, &n));
	for (size_t i = 0; i < n; i++) {
		struct jval box = jval_at(boxes, i), r = jval_get(&box, "rank");
		TRY(jval_only(&box, (const char *const[]){ "rank", "offsets", "sizes", NULL }));
		TRY(jval_integer(&r, 0, SPEC_WORLD_MAX - 1, &rank));
		if (rank >= top)
			return jval_fail(&r, ERR_WORLD_MISMATCH, "rank %jd is not in a world of %jd", (intmax_t)rank,
					 (intmax_t)top);
		TRY(check_dims(&box, "offsets", &offsets));
		TRY(check_dims(&box, "sizes", &sizes));
		if (offsets != sizes)
			return jval_fail(&box, ERR_LAYOUT_INVALID, "%zu offsets but %zu sizes", offsets, sizes);
	}
	return OK;
}

static FALLIBLE enum err check_chunks(const struct jval *chunks, int64_t world)
{
	struct jval dim = jval_get(chunks, "dim"), ranks = jval_get(chunks, "ranks");
	int64_t d = 0;
	size_t n = 0;

	TRY(jval_only(chunks, (const char *const[]){ "dim", "ranks", NULL }));
	TRY(jval_integer(&dim, -64, 63, &d));
	TRY(check_ranks(&ranks, world, false, &n));
	if (n == 0)
		return jval_fail(&ranks, ERR_LAYOUT_INVALID, "lists no rank");
	return OK;
}

static FALLIBLE enum err check_rule(const struct jval *rule, struct world *w)
{
	struct jval boxes = jval_get(rule, "boxes"), chunks = jval_get(rule, "chunks"), like = jval_get(rule, "like");
	struct jval match_at = jval_get(rule, "match");
	struct str match, text;
	bool optional = false;
	struct ref ref;

	if (!json_is_object(rule->j))
		return jval_only(rule, (const char *const[]){ NULL });
	TRY(jval_string(&match_at, &match));
	TRY(jval_opt_bool(rule, "optional", &optional));
	if (match.n == 0 || match.n > 4096)
		return jval_fail(&match_at, ERR_LAYOUT_INVALID, "a pattern has 1 to 4096 bytes");
	if (boxes.j) {
		TRY(jval_only(rule, (const char *const[]){ "match", "optional", "boxes", NULL }));
		return check_boxes(&boxes, w->size);
	}
	if (chunks.j) {
		TRY(jval_only(rule, (const char *const[]){ "match", "optional", "chunks", NULL }));
		return check_chunks(&chunks, w->size);
	}
	if (like.j) {
		TRY(jval_only(rule, (const char *const[]){ "match", "optional", "like", NULL }));
		TRY(jval_string(&like, &text));
		if (ref_parse(text, &ref) != OK || ref.kind != REF_CHECKPOINT)
			return jval_fail(&like, ERR_LAYOUT_INVALID, "must be a checkpoint, STORAGE:NAME");
		return OK;
	}
	return check_mesh_rule(rule, w);
}

FALLIBLE enum err layout_rules_check(const struct jval *v, bool in_memory, int64_t *world)
{
	struct world w = { .size = *world, .in_memory = in_memory };
	size_t n = 0;

	if (!v->j)
		return OK;
	TRY(jval_array(v, SPEC_RULES_MAX, &n));
	for (size_t i = 0; i < n; i++) {
		struct jval rule = jval_at(v, i);
		TRY(check_rule(&rule, &w));
	}
	if (*world == 0)
		*world = w.fixed;
	return OK;
}
