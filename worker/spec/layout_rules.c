/* layout_rules.c: see layout_rules.h. A request with a bad layout is answered at once with the field's place and never becomes a job; the
 * worker, which may be the first to know the world, checks by the same functions. */
#include "spec/layout_rules.h"

#include "tensor/box.h"

enum { MATCH_BYTES_MAX = 4096, NAME_BYTES_MAX = 64 };

/* ---- reading ---- */

static FALLIBLE enum err read_ints(const struct jval *list, size_t count_max, int64_t min, int64_t max, struct arena *a, int64_t **out,
				   size_t *n_out)
{
	TRY(jval_array(list, count_max, n_out));
	TRY(arena_i64(a, *n_out, out));
	for (size_t i = 0; i < *n_out; i++) {
		struct jval v = jval_at(list, i);
		TRY(jval_integer(&v, min, max, &(*out)[i]));
	}
	return OK;
}

static FALLIBLE enum err read_ranks(const struct jval *list, struct arena *a, struct layout_rule *out)
{
	int64_t rank = 0;
	uint32_t *ranks;
	size_t n = 0;

	TRY(jval_array(list, LAYOUT_WORLD_MAX, &n));
	TRY(arena_alloc(a, n, sizeof *ranks, &ranks));
	for (size_t i = 0; i < n; i++) {
		struct jval v = jval_at(list, i);
		TRY(jval_integer(&v, 0, LAYOUT_WORLD_MAX - 1, &rank));
		ranks[i] = (uint32_t)rank;
	}
	out->ranks = ranks;
	out->rank_count = (uint32_t)n;
	return OK;
}

static FALLIBLE enum err read_placements(const struct jval *rule, struct arena *a, struct layout_rule *out)
{
	struct jval list = jval_get(rule, "placements");
	struct placement *p;
	struct str text;
	size_t n = 0;

	TRY(jval_array(&list, MESH_DIMS_MAX, &n));
	TRY(arena_alloc(a, n, sizeof *p, &p));
	for (size_t i = 0; i < n; i++) {
		struct jval v = jval_at(&list, i);
		TRY(jval_string(&v, &text));
		TRY(jval_failed(&v, placement_parse(text, &p[i])));
	}
	out->placements = p;
	out->placement_count = (uint32_t)n;
	return OK;
}

/* "dim_names": one per mesh dim, each once, as DeviceMesh wants them. */
static FALLIBLE enum err read_names(const struct jval *rule, struct arena *a, struct layout_rule *out)
{
	struct jval list = jval_get(rule, "dim_names");
	size_t dims = out->mesh_ndim ? out->mesh_ndim : 1;
	struct strs names = { 0 };

	if (!list.j)
		return OK;
	TRY(jval_opt_texts(rule, "dim_names", MESH_DIMS_MAX, NAME_BYTES_MAX, a, &names));
	if (names.n != dims)
		return jval_fail(&list, ERR_LAYOUT_INVALID, "%zu names for %zu dims", names.n, dims);
	for (size_t i = 0; i < names.n; i++) {
		struct jval v = jval_at(&list, i);
		for (size_t k = 0; k < i; k++)
			if (str_eq(names.v[i], names.v[k]))
				return jval_fail(&v, ERR_LAYOUT_INVALID, "Each mesh_dim_name must be unique");
	}
	out->dim_names = names.v;
	return OK;
}

static FALLIBLE enum err read_mesh(const struct jval *rule, struct arena *a, struct layout_rule *out)
{
	struct jval mesh = jval_get(rule, "mesh"), ranks = jval_get(rule, "ranks");
	int64_t *sizes;
	size_t dims = 0;

	TRY(jval_only(rule, (const char *const[]){ "match", "optional", "mesh", "placements", "ranks", "dim_names", NULL }));
	if (mesh.j) {
		TRY(read_ints(&mesh, MESH_DIMS_MAX, 1, LAYOUT_WORLD_MAX, a, &sizes, &dims));
		if (dims == 0)
			return jval_fail(&mesh, ERR_LAYOUT_INVALID, "a mesh has at least one dim");
		out->mesh = sizes;
		out->mesh_ndim = (uint32_t)dims;
	}
	TRY(read_placements(rule, a, out));
	TRY(read_names(rule, a, out));
	return ranks.j ? read_ranks(&ranks, a, out) : OK;
}

static FALLIBLE enum err read_box(const struct jval *box, struct arena *a, struct layout_box *out)
{
	struct jval r = jval_get(box, "rank"), offsets = jval_get(box, "offsets"), sizes = jval_get(box, "sizes");
	int64_t rank = 0, *from, *size, *dims;
	size_t n = 0, m = 0;

	TRY(jval_only(box, (const char *const[]){ "rank", "offsets", "sizes", NULL }));
	TRY(jval_integer(&r, 0, LAYOUT_WORLD_MAX - 1, &rank));
	TRY(read_ints(&offsets, NDIM_MAX, 0, INT64_MAX, a, &from, &n));
	TRY(read_ints(&sizes, NDIM_MAX, 0, INT64_MAX, a, &size, &m));
	if (n != m)
		return jval_fail(box, ERR_LAYOUT_INVALID, "%zu offsets but %zu sizes", n, m);
	TRY(arena_i64(a, 2 * n, &dims));
	memcpy(dims, from, n * sizeof *dims);
	memcpy(dims + n, size, n * sizeof *dims);
	*out = (struct layout_box){ (uint32_t)rank, (uint32_t)n, dims };
	return OK;
}

static FALLIBLE enum err read_boxes(const struct jval *list, struct arena *a, struct layout_rule *out)
{
	struct layout_box *boxes;
	size_t n = 0;

	TRY(jval_array(list, LAYOUT_WORLD_MAX, &n));
	TRY(arena_alloc(a, n, sizeof *boxes, &boxes));
	for (size_t i = 0; i < n; i++) {
		struct jval box = jval_at(list, i);
		TRY(read_box(&box, a, &boxes[i]));
	}
	out->boxes = boxes;
	out->box_count = (uint32_t)n;
	return OK;
}

static FALLIBLE enum err read_chunks(const struct jval *chunks, struct arena *a, struct layout_rule *out)
{
	struct jval dim = jval_get(chunks, "dim"), ranks = jval_get(chunks, "ranks");
	int64_t d = 0;

	TRY(jval_only(chunks, (const char *const[]){ "dim", "ranks", NULL }));
	TRY(jval_integer(&dim, -64, 63, &d));
	out->chunk_dim = (int32_t)d;
	return read_ranks(&ranks, a, out);
}

static FALLIBLE enum err read_like(const struct jval *like, struct arena *a, struct layout_rule *out)
{
	struct str text;

	TRY(jval_string(like, &text));
	if (ref_parse(text, &out->like_ref) != OK || out->like_ref.kind != REF_CHECKPOINT)
		return jval_fail(like, ERR_LAYOUT_INVALID, "must be a checkpoint, STORAGE:NAME");
	return arena_str(a, out->like_ref.storage, &out->like_ref.storage);
}

static FALLIBLE enum err read_rule(const struct jval *rule, struct arena *a, struct layout_rule *out)
{
	static const struct { const char *key; enum layout_kind kind; } kinds[] = { { "boxes", LAYOUT_BOXES }, { "chunks", LAYOUT_CHUNKS },
										    { "like", LAYOUT_LIKE } };
	struct jval match = jval_get(rule, "match"), v = { 0 };

	if (!json_is_object(rule->j))
		return jval_only(rule, (const char *const[]){ NULL });
	TRY(jval_string(&match, &out->match));
	TRY(jval_opt_bool(rule, "optional", &out->optional));
	if (out->match.n == 0 || out->match.n > MATCH_BYTES_MAX)
		return jval_fail(&match, ERR_LAYOUT_INVALID, "a pattern has 1 to %d bytes", MATCH_BYTES_MAX);
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds && !v.j; i++) {
		v = jval_get(rule, kinds[i].key);
		out->kind = v.j ? kinds[i].kind : LAYOUT_MESH;
		if (v.j)
			TRY(jval_only(rule, (const char *const[]){ "match", "optional", kinds[i].key, NULL }));
	}
	switch (out->kind) {
	case LAYOUT_BOXES:
		return read_boxes(&v, a, out);
	case LAYOUT_CHUNKS:
		return read_chunks(&v, a, out);
	case LAYOUT_LIKE:
		return read_like(&v, a, out);
	case LAYOUT_MESH:
		break;
	}
	return read_mesh(rule, a, out);
}

FALLIBLE enum err layout_rules_read(const struct jval *v, size_t rules_max, struct arena *a, struct layout_rules *out)
{
	size_t n = 0;

	*out = (struct layout_rules){ .given = v->j != NULL };
	if (v->j)
		TRY(jval_array(v, rules_max, &n));
	if (n)
		TRY(arena_alloc(a, n, sizeof *out->v, &out->v));
	for (; out->n < n; out->n++) {
		struct jval rule = jval_at(v, out->n);
		TRY(read_rule(&rule, a, &out->v[out->n]));
	}
	return OK;
}

/* ---- checking ---- */

static FALLIBLE enum err check_ranks(const struct layout_rule *r, uint32_t world, bool once, struct layout_at *at)
{
	unsigned char seen[LAYOUT_WORLD_MAX / 8] = { 0 };

	if (r->rank_count == 0 || r->rank_count > LAYOUT_WORLD_MAX)
		return ERR(LAYOUT_INVALID, "lists %u ranks, not 1 to %d", r->rank_count, LAYOUT_WORLD_MAX);
	for (uint32_t i = 0; i < r->rank_count; i++) {
		uint32_t rank = r->ranks[i];
		at->index = i;
		if (rank >= world)
			return ERR(WORLD_MISMATCH, "rank %u is not in a world of %u", rank, world);
		if (once && seen[rank / 8] & 1u << rank % 8)
			return ERR(LAYOUT_INVALID, "rank %u is in the mesh twice", rank);
		seen[rank / 8] |= (unsigned char)(1u << rank % 8);
	}
	return OK;
}

static FALLIBLE enum err check_placements(const struct layout_rule *r, bool in_memory, struct layout_at *at)
{
	const struct placement *partial = NULL;

	for (uint32_t i = 0; i < r->placement_count; i++) {
		const struct placement *p = &r->placements[i];
		at->index = i;
		if (p->kind == PLACE_STRIDED_SHARD && p->split_factor < 1)
			return ERR(LAYOUT_INVALID, "the split factor of _StridedShard is at least 1, not %jd",
				   (intmax_t)p->split_factor);
		if (p->kind != PLACE_PARTIAL)
			continue;
		if (!in_memory)
			return ERR(LAYOUT_INVALID, "Any checkpointing related operations are not supported for DTensor "
				   "with partial placements: Partial(%s) has to be reduced first", placement_reduce_name(p->reduce));
		if (partial && !placement_may_mix(partial->reduce, p->reduce))
			return ERR(LAYOUT_INVALID, "Partial(%s) and Partial(%s) in one mesh", placement_reduce_name(partial->reduce),
				   placement_reduce_name(p->reduce));
		partial = p;
	}
	return OK;
}

/* *out: 0 where the mesh is as large as the world. */
static FALLIBLE enum err mesh_product(const struct layout_rule *r, uint64_t *out)
{
	*out = r->mesh_ndim ? 1 : r->rank_count;
	if (r->mesh_ndim > MESH_DIMS_MAX)
		return ERR(LAYOUT_INVALID, "a mesh has at most %d dims, not %u", MESH_DIMS_MAX, r->mesh_ndim);
	for (uint32_t i = 0; i < r->mesh_ndim; i++) {
		if (r->mesh[i] < 1)
			return ERR(LAYOUT_INVALID, "a mesh has no dim of size %jd", (intmax_t)r->mesh[i]);
		if (r->mesh[i] > LAYOUT_WORLD_MAX || *out * (uint64_t)r->mesh[i] > LAYOUT_WORLD_MAX)
			return ERR(WORLD_MISMATCH, "has more than %d ranks", LAYOUT_WORLD_MAX);
		*out *= (uint64_t)r->mesh[i];
	}
	return OK;
}

static FALLIBLE enum err check_mesh(const struct layout_rule *r, uint32_t world, bool in_memory, struct layout_at *at)
{
	uint32_t dims = r->mesh_ndim ? r->mesh_ndim : 1;
	uint64_t product;

	at->key = "mesh";
	TRY(mesh_product(r, &product));
	if (!r->ranks && r->mesh_ndim && product != world)
		return ERR(WORLD_MISMATCH, "the mesh has %ju ranks, the world %u", (uintmax_t)product, world);
	at->key = "placements";
	if (r->placement_count != dims)
		return ERR(LAYOUT_INVALID, "%u placements for a mesh of %u dims", r->placement_count, dims);
	TRY(check_placements(r, in_memory, at));
	*at = (struct layout_at){ "ranks", -1 };
	if (r->ranks && product != r->rank_count)
		return ERR(WORLD_MISMATCH, "%u ranks for a mesh of %ju", r->rank_count, (uintmax_t)product);
	return r->ranks ? check_ranks(r, world, true, at) : OK;
}

static FALLIBLE enum err check_boxes(const struct layout_rule *r, uint32_t world, struct layout_at *at)
{
	if (r->box_count == 0)
		return ERR(LAYOUT_INVALID, "lists no box");
	for (uint32_t i = 0; i < r->box_count; i++) {
		const struct layout_box *b = &r->boxes[i];
		at->index = i;
		if (b->rank >= world)
			return ERR(WORLD_MISMATCH, "rank %u is not in a world of %u", b->rank, world);
		if (b->ndim > NDIM_MAX || b->ndim != r->boxes[0].ndim)
			return ERR(LAYOUT_INVALID, "boxes of %u and %u dims", r->boxes[0].ndim, b->ndim);
		for (uint32_t d = 0; d < b->ndim * 2; d++)
			if (b->dims[d] < 0)
				return ERR(LAYOUT_INVALID, "offsets and sizes are not negative, but %jd is", (intmax_t)b->dims[d]);
	}
	return OK;
}

FALLIBLE enum err layout_rules_check_one(const struct layout_rule *r, uint32_t world, bool in_memory, struct layout_at *at)
{
	*at = (struct layout_at){ r->kind == LAYOUT_CHUNKS ? "chunks" : "boxes", -1 };
	switch (r->kind) {
	case LAYOUT_MESH:
		return check_mesh(r, world, in_memory, at);
	case LAYOUT_CHUNKS: {
		struct layout_at of_chunks = { 0 };
		return check_ranks(r, world, false, &of_chunks);
	}
	case LAYOUT_BOXES:
		return check_boxes(r, world, at);
	case LAYOUT_LIKE:
		break;
	}
	return OK;
}

/* The world that the rules' meshes fix, all the same one. */
static FALLIBLE enum err world_of(const struct jval *v, const struct layout_rules *rules, int64_t *world)
{
	for (uint32_t i = 0; i < rules->n; i++) {
		struct jval rule = jval_at(v, i), mesh = jval_get(&rule, rules->v[i].mesh_ndim ? "mesh" : "ranks");
		uint64_t product = 0;
		if (rules->v[i].kind == LAYOUT_MESH)
			TRY(jval_failed(&mesh, mesh_product(&rules->v[i], &product)));
		if (*world > 0 && product > 0 && product != (uint64_t)*world)
			return jval_fail(&mesh, ERR_WORLD_MISMATCH, "asks for %ju ranks, an earlier rule for %jd: give world_size",
					 (uintmax_t)product, (intmax_t)*world);
		if (product > 0)
			*world = (int64_t)product;
	}
	return OK;
}

FALLIBLE enum err layout_rules_check(const struct jval *v, const struct layout_rules *rules, bool in_memory, int64_t *world)
{
	struct layout_at at;

	if (*world == 0)
		TRY(world_of(v, rules, world));
	for (uint32_t i = 0; i < rules->n; i++) {
		enum err e = layout_rules_check_one(&rules->v[i], *world ? (uint32_t)*world : LAYOUT_WORLD_MAX, in_memory, &at);
		struct jval rule = jval_at(v, i), list = jval_get(&rule, at.key), item = jval_at(&list, (size_t)at.index);
		TRY(jval_failed(at.index < 0 ? &list : &item, e));
	}
	return OK;
}
