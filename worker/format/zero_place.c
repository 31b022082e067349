/* zero_place.c: where the elements of each parameter lie in the flat tensors of all ranks (zero_open.c says how). A run of a stream is a
 * run of a parameter's elements in C order, which linear.h cuts into boxes: these are the chunks. So a parameter is read from many files
 * and is never whole in memory. */
#include <stdlib.h>

#include "base/mem.h"
#include "base/num.h"
#include "format/zero_impl.h"
#include "tensor/linear.h"

enum { COPIES_MAX = 1 << 20 };

/* ---------------------------------------------------------------------------------------------------------- numbers */

/* The parameters of an optimizer's group: *first to *end. DeepSpeed once saved stage 3 as one group, whatever groups there were. */
static void params_of(const struct zero *z, uint32_t group, uint64_t *first, uint64_t *end)
{
	const struct zero_model *m = &z->model;
	bool alike = z->group_count == m->group_count;
	uint64_t lo = 0, hi = m->params.n;

	while (alike && lo < hi) {
		uint64_t mid = lo + (hi - lo) / 2;
		if (m->params.v[mid].group < group)
			lo = mid + 1;
		else
			hi = mid;
	}
	*first = lo;
	for (*end = lo; *end < m->params.n && (!alike || m->params.v[*end].group == group);)
		++*end;
}

bool zero_is_number(const struct zero *z, const struct torch_leaf *leaf)
{
	const struct item_tensor *t = &leaf->tensor;

	return (z->group_count == z->model.group_count || z->group_count == 1) &&
	       (!leaf->is_tensor || (t->ndim == 0 && !leaf->is_sharded && !t->neg && !t->conj));
}

enum err zero_put_number(struct zero *z, const struct torch_file *f, uint32_t file, const struct torch_leaf *leaf, uint32_t group,
			 struct str key)
{
	struct sdict *sd = z->model.sd;
	struct torch_leaf copy = *leaf;
	struct sd_loc loc = { .file = file };
	uint64_t first, end;
	uint32_t index;

	params_of(z, group, &first, &end);
	z->copies += end - first;
	if (z->copies > COPIES_MAX)
		return ERR(LIMIT_EXCEEDED, "more than %d numbers of parameters in the optimizer's state", COPIES_MAX);
	for (uint64_t i = first; i < end; i++) {
		TRY(zero_name(z->model.arena, key, z->model.params.v[i].fqn, &copy.fqn, &copy.path));
		if (!leaf->is_tensor) {
			TRY(torch_file_add_value(f, &copy, sd, 0));
			continue;
		}
		loc.length = dtype_bytes(leaf->tensor.dtype);
		loc.offset = f->storages.v[leaf->storage].offset + leaf->tensor.storage_offset * loc.length;
		TRY(sdict_add_tensor(sd, copy.fqn, leaf->tensor.dtype, 0, NULL, &index));
		TRY(sdict_add_chunk(sd, index, NULL, 0, loc));
		TRY(sdict_copy_path(sd, copy.path, &sd->tensors[index].path));
	}
	return OK;
}

/* ---------------------------------------------------------------------------------------------------------- streams */

/* Gives each parameter its place, and compares the streams' lengths as zero_to_fp32.py does. */
static FALLIBLE enum err place_params(struct zero *z)
{
	struct zero_model *m = &z->model;
	uint64_t at = 0;

	for (uint64_t i = 0; i < m->params.n; i++) {
		struct zero_param *p = &m->params.v[i];
		if (!m->sliced && i && p->group != p[-1].group)
			at = 0;
		p->at = at;
		enum err e = num_add(at, m->sliced ? num_div_up(p->numel, z->world_size) : p->numel, &at);
		if (!e && z->paddings.n)
			e = num_add(at, z->paddings.v[i], &at);
		TRY(err_at_fqn(e, p->fqn.p, p->fqn.n));
	}
	return OK;
}

/* need: where the last parameter of the stream ends. */
static FALLIBLE enum err check_length(const struct zero *z, uint32_t stream, uint64_t need, uint64_t have, const struct zero_param *last)
{
	uint64_t align = z->model.sliced ? 1 : 2ull * z->world_size;

	if (need <= have && num_div_up(need, align) == num_div_up(have, align))
		return OK;
	enum err e = ERR(FORMAT_METADATA, "the parameters of %s %u have %ju elements in param_shapes, %ju in the optimizer's files",
			 z->model.sliced ? "rank" : "group", stream, (uintmax_t)need, (uintmax_t)have);
	return last ? err_at_fqn(e, last->fqn.p, last->fqn.n) : e;
}

static FALLIBLE enum err place_masters(struct zero *z)
{
	const struct zero_model *m = &z->model;
	uint32_t streams = m->sliced ? z->world_size : z->group_count, parts = m->sliced ? z->group_count : z->world_size;
	uint64_t end = 0, padding;

	if (!m->sliced && m->group_count != z->group_count)
		return ERR(FORMAT_METADATA, "param_shapes has %ju groups, the optimizer's files %u", (uintmax_t)m->group_count,
			   z->group_count);
	for (uint32_t s = 0; s < streams; s++) {
		const struct zero_param *last = NULL;
		uint64_t have = 0, need = 0;
		for (uint32_t k = 0; k < parts; k++) {
			struct zero_flat *f = &z->masters.v[m->sliced ? (uint64_t)s * parts + k : (uint64_t)k * streams + s];
			f->start = have;
			TRY(num_add(have, f->numel, &have));
		}
		for (; end < m->params.n && (m->sliced || m->params.v[end].group == s); end++)
			last = &m->params.v[end];
		if (m->sliced && m->params.n)
			last = &m->params.v[m->params.n - 1];
		padding = last && z->paddings.n ? z->paddings.v[last - m->params.v] : 0;
		if (last)
			need = last->at + (m->sliced ? num_div_up(last->numel, z->world_size) : last->numel) + padding;
		TRY(check_length(z, s, need, have, last));
	}
	return OK;
}

static int by_place(const void *a, const void *b)
{
	const struct zero_flat *x = a, *y = b;

	if (x->state != y->state)
		return x->state < y->state ? -1 : 1;
	if (x->stream != y->stream)
		return x->stream < y->stream ? -1 : 1;
	if (x->start != y->start)
		return x->start < y->start ? -1 : 1;
	if (x->group != y->group)
		return x->group < y->group ? -1 : 1;
	return x->rank < y->rank ? -1 : x->rank > y->rank;
}

/* Frozen parameters' fragments come rank by rank. */
static FALLIBLE enum err place_fragments(struct zero *z)
{
	struct zero_model *m = &z->model;
	CLEANUP(mem_free_ptr) uint64_t *ends = mem_zalloc(m->frozen.n + 1, sizeof *ends);

	NEED(ends, "no memory for %ju frozen parameters", (uintmax_t)m->frozen.n);
	each(f, m->fragments.v, m->fragments.n) {
		f->start = ends[f->stream];
		TRY(num_add(f->start, f->numel, &ends[f->stream]));
	}
	return OK;
}

static FALLIBLE enum err add_flats(struct zero *z, const struct zero_flat *v, uint64_t n)
{
	struct zero_flat *kept;

	for (uint64_t i = 0; i < n; i++) {
		TRY(vec_push(&z->flats, &kept));
		*kept = v[i];
	}
	return OK;
}

static FALLIBLE enum err sort_flats(struct zero *z)
{
	each(f, z->flats.v, z->flats.n)
		f->start = z->masters.v[(uint64_t)f->rank * z->group_count + f->group].start;
	TRY(place_fragments(z));
	TRY(add_flats(z, z->masters.v, z->masters.n));
	TRY(add_flats(z, z->model.fragments.v, z->model.fragments.n));
	if (z->flats.n)
		qsort(z->flats.v, z->flats.n, sizeof *z->flats.v, by_place);
	for (uint64_t i = 1; i < z->flats.n; i++) {
		const struct zero_flat *f = &z->flats.v[i];
		if (f->state == f[-1].state && f->group == f[-1].group && f->rank == f[-1].rank)
			return err_at_rank(ERR(FORMAT_METADATA, "the file of the rank has a state of group %u twice", f->group), f->rank);
	}
	return OK;
}

/* ----------------------------------------------------------------------------------------------------------- chunks */

/* A parameter's state on its way into the sdict. It is looked through twice: what there is of it must be all. */
struct placing {
	const struct zero *z;
	const struct zero_param *p;
	uint32_t state, tensor;
	bool adds;
	enum dtype dtype;
	uint64_t found;                         /* elements */
};

/* The parameter's elements first … first + n lie in the flat from its element `skip` on. */
static FALLIBLE enum err add_run(const struct placing *pl, const struct zero_flat *f, uint64_t skip, uint64_t first, uint64_t n)
{
	struct linear boxes = linear_range(pl->p->ndim, pl->p->shape, first, first + n);
	struct sd_loc loc = { .file = f->file, .offset = f->offset + skip * dtype_bytes(f->dtype) };
	int64_t dims[2 * NDIM_MAX];

	while (linear_next(&boxes, dims, dims + pl->p->ndim)) {
		loc.length = box_volume(pl->p->ndim, dims + pl->p->ndim) * dtype_bytes(f->dtype);
		TRY(sdict_add_chunk(pl->z->model.sd, pl->tensor, dims, f->rank, loc));
		loc.offset += loc.length;
	}
	return OK;
}

/* The last flat of the stream that begins at `at` or before. */
static uint64_t flat_before(const struct zero *z, uint32_t state, uint32_t stream, uint64_t at)
{
	const struct zero_flat key = { .state = state, .stream = stream, .start = at, .group = UINT32_MAX, .rank = UINT32_MAX };
	uint64_t lo = 0, hi = z->flats.n;

	while (lo < hi) {
		uint64_t mid = lo + (hi - lo) / 2;
		if (by_place(&z->flats.v[mid], &key) <= 0)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo ? lo - 1 : 0;
}

/* The parameter's elements first … first + n lie in the stream from its element `at` on. */
static FALLIBLE enum err follow(struct placing *pl, uint32_t stream, uint64_t at, uint64_t first, uint64_t n)
{
	const struct zero *z = pl->z;

	for (uint64_t i = flat_before(z, pl->state, stream, at); i < z->flats.n; i++) {
		const struct zero_flat *f = &z->flats.v[i];
		bool there = f->state == pl->state && f->stream == stream;
		if (f->state > pl->state || (f->state == pl->state && f->stream > stream) || (there && f->start >= at + n))
			break;
		uint64_t begin = num_max(at, f->start), end = num_min(at + n, f->start + f->numel);
		if (!there || begin >= end)
			continue;
		if (pl->found && f->dtype != pl->dtype)
			return err_at_rank(ERR(FORMAT_METADATA, "dtype %s in the rank's file, %s in another", dtype_name(f->dtype),
					       dtype_name(pl->dtype)), f->rank);
		pl->dtype = f->dtype;
		pl->found += end - begin;
		if (pl->adds)
			TRY(add_run(pl, f, begin - f->start, first + (begin - at), end - begin));
	}
	return OK;
}

static FALLIBLE enum err go_through(struct placing *pl)
{
	const struct zero_param *p = pl->p;
	uint64_t part = num_div_up(p->numel, pl->z->world_size);

	pl->found = 0;
	if (pl->state == ZERO_FROZEN)
		return follow(pl, (uint32_t)(p - pl->z->model.frozen.v), 0, 0, p->numel);
	if (!pl->z->model.sliced)
		return follow(pl, p->group, p->at, 0, p->numel);
	for (uint32_t r = 0; r < pl->z->world_size && (uint64_t)r * part < p->numel; r++)
		TRY(follow(pl, r, p->at, r * part, num_min(part, p->numel - r * part)));
	return OK;
}

/* A frozen parameter without elements has fragments without any, which have its dtype. */
static void find_dtype(const struct zero *z, struct placing *pl)
{
	uint64_t at = flat_before(z, pl->state, (uint32_t)(pl->p - z->model.frozen.v), 0);

	if (at < z->flats.n && z->flats.v[at].state == ZERO_FROZEN && &z->model.frozen.v[z->flats.v[at].stream] == pl->p)
		pl->dtype = z->flats.v[at].dtype;
}

static FALLIBLE enum err put_param(struct zero *z, const struct zero_param *p, uint32_t state)
{
	struct str key = state == ZERO_FROZEN ? STR("") : z->states.v[state], fqn;
	struct placing pl = { .z = z, .p = p, .state = state, .dtype = DT_FLOAT32 };
	struct sdict *sd = z->model.sd;
	int64_t dims[2 * NDIM_MAX] = { 0 };
	struct sd_path path;

	TRY(go_through(&pl));
	if (pl.found == 0 && key.n)
		return OK; /* optimizers make state when they need it first */
	if (pl.found != p->numel)
		return ERR(CHECKPOINT_INCOMPLETE, "the ranks' files hold %ju of the %ju elements of its %s", (uintmax_t)pl.found,
			   (uintmax_t)p->numel, key.n ? key.p : "values");
	if (p->numel == 0 && state == ZERO_FROZEN)
		find_dtype(z, &pl);
	TRY(zero_name(z->model.arena, key, p->fqn, &fqn, &path));
	TRY(sdict_add_tensor(sd, fqn, pl.dtype, p->ndim, p->shape, &pl.tensor));
	TRY(sdict_copy_path(sd, path, &sd->tensors[pl.tensor].path));
	pl.adds = true;
	if (p->numel)
		return go_through(&pl);
	if (p->ndim)
		memcpy(dims + p->ndim, p->shape, p->ndim * sizeof *dims);
	return sdict_add_chunk(sd, pl.tensor, dims, 0, (struct sd_loc){ 0 });
}

static FALLIBLE enum err put_all(struct zero *z)
{
	const struct zero_model *m = &z->model;

	for (uint32_t state = 0; state < z->states.n; state++)
		for (uint64_t i = 0; i < m->params.n; i++)
			TRY(err_at_fqn(put_param(z, &m->params.v[i], state), m->params.v[i].fqn.p, m->params.v[i].fqn.n));
	for (uint64_t i = 0; m->sliced && i < m->frozen.n; i++)
		TRY(err_at_fqn(put_param(z, &m->frozen.v[i], ZERO_FROZEN), m->frozen.v[i].fqn.p, m->frozen.v[i].fqn.n));
	return zero_model_share(m);
}

enum err zero_put(struct zero *z)
{
	if (z->masters.n) {
		TRY(place_params(z));
		TRY(place_masters(z));
	}
	TRY(sort_flats(z));
	return put_all(z);
}

void zero_free(struct zero *z)
{
	vec_free(&z->states);
	map_free(&z->by_state);
	vec_free(&z->masters);
	vec_free(&z->flats);
	vec_free(&z->paddings);
	zero_model_free(&z->model);
}
