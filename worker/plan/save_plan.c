/* save_plan.c: dedup and order of a save (see save_plan.h).
 *
 * Equal boxes of one tensor form a chain; each chain gets one writer. PyTorch identifies an item by FQN and offset and balances by
 * the size of the whole tensor; here a box counts as what it is, offsets and sizes, and by its own bytes, so that ranks end up with
 * like amounts. All is done with arrays of chunk indices and counting sorts: a million chunks are an ordinary input. */
#include "plan/save_plan.h"

#include <stdlib.h>

#include "base/mem.h"
#include "base/num.h"
#include "base/table.h"
#include "plan/tiling.h"
#include "tensor/box.h"

enum { RANKS_MAX = 65536, SCRATCH_KEPT = 1 << 20 }; /* SCRATCH_KEPT: so few free bytes may stay in the heap */
#define NONE UINT32_MAX

struct maker {
	const struct sdict *held;
	enum dedup how;
	bool values;                     /* the items are values, not chunks */
	uint32_t *next;                  /* item → next replica of it on another rank, or NONE */
	uint32_t *heads, *writers;       /* one per distinct item: the first replica, the one that is written */
	uint32_t *keys, *sorted;         /* scratch: a sort key and an order, one per distinct item */
	uint64_t *bytes;                 /* of each distinct item */
	uint32_t *first_head;            /* tensor → its first distinct box; one more at the end */
	uint64_t count;                  /* distinct items */
	struct table(struct table_item) boxes;   /* of one tensor: index into heads */
	uint64_t *load;                  /* bytes per rank so far */
	uint32_t *starts;                /* scratch of counting sorts */
	struct save_plan_stats stats;
};

static void drop(void *array_ptr)
{
	void *none = NULL;

	mem_free_ptr(array_ptr);
	memcpy(array_ptr, &none, sizeof none);
}

/* Frees the candidates, which are of no use once the writers are known. */
static void choice_free(struct maker *m)
{
	drop(&m->next);
	drop(&m->heads);
	drop(&m->bytes);
}

static void items_free(struct maker *m)
{
	choice_free(m);
	drop(&m->writers);
	drop(&m->keys);
	drop(&m->sorted);
}

static void maker_free(struct maker *m)
{
	items_free(m);
	mem_free(m->first_head);
	table_free(&m->boxes);
	mem_free(m->load);
	mem_free(m->starts);
}

/* Arrays over n items: chunks first, then values. */
static FALLIBLE enum err items_init(struct maker *m, uint64_t n)
{
	items_free(m);
	m->count = 0;
	m->next = mem_zalloc(n, sizeof *m->next);
	m->heads = mem_zalloc(n, sizeof *m->heads);
	m->writers = mem_zalloc(n, sizeof *m->writers);
	m->keys = mem_zalloc(n, sizeof *m->keys);
	m->sorted = mem_zalloc(n, sizeof *m->sorted);
	m->bytes = mem_zalloc(n, sizeof *m->bytes);
	NEED(m->next && m->heads && m->writers && m->keys && m->sorted && m->bytes, "no memory to plan %ju items", (uintmax_t)n);
	return OK;
}

static FALLIBLE enum err maker_init(struct maker *m, const struct sdict *held, enum dedup how)
{
	*m = (struct maker){ .held = held, .how = how };
	TRY(items_init(m, held->chunk_count));
	m->first_head = mem_zalloc(held->tensor_count + 1, sizeof *m->first_head);
	m->load = mem_zalloc(RANKS_MAX, sizeof *m->load);
	m->starts = mem_zalloc(RANKS_MAX + 1, sizeof *m->starts);
	NEED(m->first_head && m->load && m->starts, "no memory to plan %ju tensors", (uintmax_t)held->tensor_count);
	for (uint64_t i = 0; i < held->chunk_count; i++)
		if (held->chunks[i].rank >= RANKS_MAX)
			return err_at_rank(ERR(LIMIT_EXCEEDED, "ranks go up to %d", RANKS_MAX - 1),
					   held->chunks[i].rank);
	for (uint64_t i = 0; i < held->value_count; i++)
		if (held->values[i].rank >= RANKS_MAX)
			return err_at_rank(ERR(LIMIT_EXCEEDED, "ranks go up to %d", RANKS_MAX - 1),
					   held->values[i].rank);
	return OK;
}

/* The usual case: one rank after the other holds the next part, nothing twice. */
static bool ascending(const struct sdict *sd, const struct sd_tensor *t)
{
	for (uint64_t i = t->first_chunk + 1; i < t->first_chunk + t->chunk_count; i++)
		if (num_order_rows(sd->chunks[i - 1].dims, sd->chunks[i].dims, t->ndim * 2) >= 0)
			return false;
	return true;
}

/* Adds the chunk to the chain of its box; m->keys: per distinct box of this tensor, the end of its chain. */
static FALLIBLE enum err chain(struct maker *m, const struct sd_tensor *t, uint32_t chunk)
{
	const struct sdict *sd = m->held;
	const int64_t *d = sd->chunks[chunk].dims;
	uint32_t hash = table_hash((struct str){ (const char *)d, t->ndim * 2 * sizeof *d });
	struct table_item *same;

	table_find(&m->boxes, hash, same, num_order_rows(sd->chunks[m->heads[same->item]].dims, d, t->ndim * 2) == 0);
	if (same) {
		m->next[m->keys[same->item]] = chunk;
		m->keys[same->item] = chunk;
		return OK;
	}
	TRY(table_add(&m->boxes, hash, &same));
	same->item = (uint32_t)m->count;
	m->heads[m->count] = m->keys[m->count] = chunk;
	m->count++;
	return OK;
}

/* Empty boxes are not written, but a tensor without elements keeps one, else it would vanish. */
static FALLIBLE enum err group(struct maker *m, const struct sd_tensor *t)
{
	uint64_t end = t->first_chunk + t->chunk_count, first_head = m->count;
	bool nothing_twice = ascending(m->held, t), tensor_empty = box_empty(t->ndim, t->shape);

	table_free(&m->boxes);
	if (!nothing_twice && !tensor_empty)
		TRY(table_reserve(&m->boxes, t->chunk_count));
	for (uint64_t i = t->first_chunk; i < end; i++) {
		m->next[i] = NONE;
		if (tensor_empty) {
			if (m->count == first_head)
				m->heads[m->count++] = (uint32_t)i;
		} else if (box_empty(t->ndim, m->held->chunks[i].dims + t->ndim)) {
			continue;
		} else if (nothing_twice) {
			m->heads[m->count++] = (uint32_t)i;
		} else {
			TRY(chain(m, t, (uint32_t)i));
		}
	}
	return OK;
}

/* Boxes that leave their tensor are refused first: later arithmetic relies on it. */
static FALLIBLE enum err check_bounds(const struct sdict *sd, const struct sd_tensor *t)
{
	char o[96], s[96], size[96];

	for (uint64_t i = t->first_chunk; i < t->first_chunk + t->chunk_count; i++) {
		const int64_t *d = sd->chunks[i].dims;
		if (box_inside(t->ndim, d, d + t->ndim, t->shape))
			continue;
		enum err e = ERR(PLAN_INVALID, "key:%.*s has out of bounds chunk: tensor-size:%s chunk: %s+%s",
				 (int)num_min(t->fqn.n, 200), t->fqn.p, box_print(t->ndim, t->shape, size, sizeof size),
				 box_print(t->ndim, d, o, sizeof o), box_print(t->ndim, d + t->ndim, s, sizeof s));
		return err_at_rank(err_at_fqn(e, t->fqn.p, t->fqn.n), sd->chunks[i].rank);
	}
	return OK;
}

/* Stable: lists the distinct items from..to-1 in out[from..to-1] by their keys, which are ranks. */
static void sort_by_rank(struct maker *m, uint64_t from, uint64_t to, uint32_t *out)
{
	memset(m->starts, 0, (RANKS_MAX + 1) * sizeof *m->starts);
	for (uint64_t i = from; i < to; i++)
		m->starts[m->keys[i] + 1]++;
	for (uint32_t k = 0; k < RANKS_MAX; k++)
		m->starts[k + 1] += m->starts[k];
	for (uint64_t i = from; i < to; i++)
		out[from + m->starts[m->keys[i]]++] = (uint32_t)i;
}

static uint64_t chunk_bytes(const struct sdict *sd, uint32_t chunk)
{
	const struct sd_tensor *t = &sd->tensors[sd->chunks[chunk].tensor];
	uint64_t n = dtype_bytes(t->dtype);

	for (uint32_t d = 0; d < t->ndim; d++) /* inside the tensor, whose bytes fit */
		n *= (uint64_t)sd->chunks[chunk].dims[t->ndim + d];
	return n;
}

static uint64_t value_bytes(const struct sd_value *v)
{
	return v->kind == SD_VALUE_INLINE ? v->bytes.n : v->loc.length;
}

static uint32_t rank_of(const struct maker *m, uint32_t item)
{
	return m->values ? m->held->values[item].rank : m->held->chunks[item].rank;
}

/* Gives an item to one of the ranks that hold it. */
static void choose(struct maker *m, uint32_t distinct)
{
	uint32_t best = m->heads[distinct], rank = rank_of(m, best);
	bool balanced = m->how == DEDUP_BALANCED;

	for (uint32_t i = m->next[best]; i != NONE; i = m->next[i]) {
		uint32_t other = rank_of(m, i);
		uint64_t a = m->load[other], b = m->load[rank];
		if ((balanced && a < b) || ((!balanced || a == b) && other < rank)) {
			best = i;
			rank = other;
		}
	}
	m->writers[distinct] = best;
	m->load[rank] += num_max(m->bytes[distinct], 1);
}

/* PyTorch walks rank 0's items, then those that only later ranks have. Where nothing is replicated nothing has to be chosen. */
static void choose_all(struct maker *m)
{
	bool replicas = false;

	for (uint64_t i = 0; i < m->count; i++) {
		uint32_t head = m->heads[i], copies = 1;
		m->keys[i] = rank_of(m, head);
		m->bytes[i] = m->values ? value_bytes(&m->held->values[head]) : chunk_bytes(m->held, head);
		for (uint32_t j = m->next[head]; j != NONE; j = m->next[j], copies++)
			m->keys[i] = rank_of(m, j) < m->keys[i] ? rank_of(m, j) : m->keys[i];
		m->writers[i] = head;
		m->stats.bytes_total += m->bytes[i];
		m->stats.bytes_saved += m->bytes[i] * (copies - 1);
		replicas = replicas || copies > 1;
	}
	sort_by_rank(m, 0, m->count, m->sorted);
	for (uint64_t i = 0; i < m->count; i++) {
		uint32_t item = m->sorted[i];
		if (!replicas || m->next[m->heads[item]] == NONE)
			m->load[m->keys[item]] += num_max(m->bytes[item], 1);
		else
			choose(m, item);
	}
}

/* Tells whether ranks share copies: a plan of much replicated data would otherwise keep every rank's list. */
static bool shares(const struct maker *m)
{
	return m->held->chunk_count <= m->count * 2;
}

static FALLIBLE enum err add_tensor(struct maker *m, struct sdict *plan, uint32_t tensor, uint32_t *at)
{
	const struct sd_tensor *t = &m->held->tensors[tensor];

	if (shares(m))
		return sdict_add_tensor_of(plan, t, at);
	TRY(sdict_add_tensor(plan, t->fqn, t->dtype, t->ndim, t->shape, at));
	plan->tensors[*at].requires_grad = t->requires_grad;
	return sdict_copy_path(plan, t->path, &plan->tensors[*at].path);
}

static int by_key(const void *a, const void *b, void *keys)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
	uint32_t rx = ((const uint32_t *)keys)[x], ry = ((const uint32_t *)keys)[y];

	return num_order(rx, ry) ?: num_order(x, y);
}

/* Orders the distinct boxes of each tensor by writer, then as held. */
static void order_chunks(struct maker *m, uint32_t *order)
{
	for (uint32_t t = 0; t < m->held->tensor_count; t++) {
		uint32_t from = m->first_head[t], to = m->first_head[t + 1];
		bool sorted = true;

		for (uint32_t i = from; i < to; i++) {
			order[i] = i;
			m->keys[i] = rank_of(m, m->writers[i]);
			sorted = sorted && (i == from || m->keys[i - 1] <= m->keys[i]);
		}
		if (!sorted && to - from > RANKS_MAX / 8)
			sort_by_rank(m, from, to, order);
		else if (!sorted)
			qsort_r(order + from, to - from, sizeof *order, by_key, m->keys);
	}
}

/* Tensors in the order in which they come up when ranks are walked in turn. */
static FALLIBLE enum err emit_tensors(struct maker *m, struct sdict *plan)
{
	const struct sdict *held = m->held;
	uint64_t tensors = held->tensor_count;
	CLEANUP(mem_free_ptr) uint32_t *turn = mem_zalloc(tensors, sizeof *turn);
	uint32_t *order = m->sorted;

	NEED(turn, "no memory to plan %ju tensors", (uintmax_t)tensors);
	choice_free(m);
	order_chunks(m, order);
	memset(m->starts, 0, (RANKS_MAX + 1) * sizeof *m->starts);
	for (int pass = 0; pass < 2; pass++) {
		for (uint32_t t = 0; t < tensors; t++) {
			bool none = m->first_head[t] == m->first_head[t + 1]; /* last: validation will complain */
			uint32_t rank = none ? RANKS_MAX - 1 : m->keys[order[m->first_head[t]]];
			if (pass == 0)
				m->starts[rank + 1]++;
			else
				turn[m->starts[rank]++] = t;
		}
		for (uint32_t k = 0; pass == 0 && k < RANKS_MAX; k++)
			m->starts[k + 1] += m->starts[k];
	}
	for (uint64_t i = 0; i < m->count; i++)
		order[i] = m->writers[order[i]];
	drop(&m->writers);
	drop(&m->keys);
	mem_trim(SCRATCH_KEPT);
	for (uint64_t i = 0; i < tensors; i++) {
		uint32_t at, t = turn[i];
		TRY(add_tensor(m, plan, t, &at));
		for (uint32_t j = m->first_head[t]; j < m->first_head[t + 1]; j++) {
			const struct sd_chunk *c = &held->chunks[order[j]];
			TRY(shares(m) ? sdict_add_chunk_of(plan, at, c) : sdict_add_chunk(plan, at, c->dims, c->rank, c->loc));
		}
	}
	m->stats.chunk_count = m->count;
	return OK;
}

static FALLIBLE enum err emit_value(struct sdict *plan, const struct sd_value *v)
{
	uint32_t at;

	TRY(sdict_add_value(plan, v->fqn, v->rank, v->loc, &at));
	struct sd_value *out = &plan->values[at];
	out->kind = v->kind;
	if (v->kind == SD_VALUE_INLINE)
		TRY(arena_str(plan->arena, v->bytes, &out->bytes));
	return sdict_copy_path(plan, v->path, &out->path);
}

/* Values are small and come last: they even out what the tensors left. */
static FALLIBLE enum err plan_values(struct maker *m, struct sdict *plan)
{
	const struct sdict *held = m->held;
	CLEANUP(mem_free_ptr) uint32_t *tail = mem_zalloc(held->value_count, sizeof *tail);

	NEED(tail, "no memory to plan %ju values", (uintmax_t)held->value_count);
	m->values = true;
	TRY(items_init(m, held->value_count));
	for (uint32_t i = 0; i < held->value_count; i++) {
		uint32_t first = sdict_find(held, held->values[i].fqn) & ~SD_VALUE_BIT;
		must(first <= i); /* replicas follow the one that the map knows */
		m->next[i] = NONE;
		if (first == i)
			m->heads[m->count++] = i;
		else
			m->next[tail[first]] = i;
		tail[first] = i;
	}
	choose_all(m);
	for (uint64_t i = 0; i < m->count; i++)
		m->keys[i] = rank_of(m, m->writers[i]);
	sort_by_rank(m, 0, m->count, m->sorted);
	for (uint64_t i = 0; i < m->count; i++)
		TRY(emit_value(plan, &held->values[m->writers[m->sorted[i]]]));
	return OK;
}

static FALLIBLE enum err copy_tables(const struct sdict *from, struct sdict *to)
{
	uint32_t at;

	to->has_paths = from->has_paths;
	TRY(sdict_copy_files(to, from));
	for (uint64_t i = 0; i < from->transform_count; i++)
		TRY(sdict_add_transform(to, from->transforms[i], &at));
	return OK;
}

enum err save_plan_make(const struct sdict *held, enum dedup how, uint64_t arena_cap_bytes,
			struct sdict **plan_out, struct save_plan_stats *stats_out)
{
	CLEANUP(sdict_free_ptr) struct sdict *plan = NULL;
	CLEANUP(maker_free) struct maker m;

	TRY(maker_init(&m, held, how));
	TRY(sdict_new(arena_cap_bytes, &plan));
	TRY(copy_tables(held, plan));
	for (uint64_t i = 0; i < held->tensor_count; i++) {
		m.first_head[i] = (uint32_t)m.count;
		TRY(check_bounds(held, &held->tensors[i]));
		TRY(group(&m, &held->tensors[i]));
	}
	m.first_head[held->tensor_count] = (uint32_t)m.count;
	choose_all(&m);
	TRY(sdict_reserve(plan, held->names.raw.count, held->tensor_count, m.count));
	if (shares(&m))
		sdict_borrow(plan, held);
	TRY(emit_tensors(&m, plan));
	TRY(plan_values(&m, plan));
	*stats_out = m.stats;
	*plan_out = move(plan);
	return OK;
}

enum err save_plan_validate(const struct sdict *plan)
{
	CLEANUP(tiling_free) struct tiling t;
	struct overlap_box *boxes;

	tiling_init(&t);
	for (uint64_t i = 0; i < plan->tensor_count && !tiling_full(&t); i++) {
		const struct sd_tensor *x = &plan->tensors[i];
		TRY(tiling_boxes(&t, x->chunk_count, &boxes));
		for (uint64_t j = 0; j < x->chunk_count; j++)
			boxes[j].dims = plan->chunks[x->first_chunk + j].dims;
		TRY(tiling_check(&t, x->fqn, x->ndim, x->shape, boxes, x->chunk_count));
	}
	if (t.problems == 0)
		return OK;
	int n = (int)t.text.len;
	const char *text = n ? (const char *)t.text.p : "";
	enum err e = t.holes_only ? ERR(COVERAGE_HOLE, "%.*s", n, text)
				  : ERR(PLAN_INVALID, "Failed to validate global plan: %.*s", n, text);
	return err_at_fqn(e, t.first_key.p, t.first_key.n);
}
