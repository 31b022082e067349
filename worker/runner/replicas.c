/* replicas.c: see replicas.h. CRC32s are compared: those of the written payloads are known anyway. */
#include "runner/replicas.h"


#include "base/jtext.h"
#include "base/map.h"
#include "io/digest.h"

enum { DIVERGENT_MAX = 1000 };

void replicas_free(struct replicas *r)
{
	sdict_free(r->sd);
	mem_free(r->plan_chunk);
	json_decref(r->list);
	*r = (struct replicas){ 0 };
}

static FALLIBLE enum err differ(uint32_t a, uint32_t b, struct str fqn)
{
	enum err e = ERR(DIVERGENT, "the replicas of ranks %u and %u differ", a, b);

	return err_at_rank(err_at_fqn(e, fqn.p, fqn.n), b);
}

static void add_digest(json_t *entry, uint32_t rank, uint32_t crc)
{
	json_array_append_new(json_object_get(entry, "ranks"), json_integer(rank));
	json_array_append_new(json_object_get(entry, "digests"), json_sprintf("crc32:%08x", crc));
}

/* Entries of a value come rank by rank, but among entries of other values. */
enum err replicas_values(const struct sdict *held, struct replicas *out)
{
	CLEANUP(mem_free_ptr) json_t **entries = mem_zalloc(held->value_count, sizeof *entries);

	out->list = json_array();
	NEED(entries && out->list, "no memory to compare replicas");
	each(d, held->differing, held->differing_count) {
		const struct sd_value *v = &held->values[d->value];
		if (out->fail)
			return differ(v->rank, d->rank, v->fqn);
		json_t *entry = entries[d->value];
		if (!entry && json_array_size(out->list) >= DIVERGENT_MAX)
			continue;
		if (!entry) {
			entry = json_pack("{s:o, s:[], s:[]}", "fqn", jtext_value(v->fqn), "ranks", "digests");
			if (!entry || json_array_append_new(out->list, entry) < 0)
				return ERR(NO_MEMORY, "no memory to list replicas");
			entries[d->value] = entry;
			add_digest(entry, v->rank, digest_crc32(0, v->bytes.p, v->bytes.n));
		}
		add_digest(entry, d->rank, digest_crc32(0, d->bytes.p, d->bytes.n));
	}
	return OK;
}

static struct str box_key(const struct sd_chunk *c, uint32_t ndim)
{
	return (struct str){ (const char *)c->dims, 2ull * ndim * sizeof *c->dims };
}

static FALLIBLE enum err add(struct replicas *r, const struct sd_tensor *t, const struct sd_chunk *c, uint32_t plan_chunk)
{
	const struct sd_tensor *mine = sdict_tensor(r->sd, t->fqn);
	uint32_t index = mine ? (uint32_t)(mine - r->sd->tensors) : 0;

	if (!mine)
		TRY(sdict_add_tensor(r->sd, t->fqn, t->dtype, t->ndim, t->shape, &index));
	TRY(sdict_add_chunk(r->sd, index, c->dims, c->rank, c->loc));
	uint32_t *more = mem_grow(r->plan_chunk, r->count + 1, sizeof *more);
	NEED(more, "no memory for %ju replicas", (uintmax_t)r->count);
	r->plan_chunk = more;
	more[r->count++] = plan_chunk;
	return OK;
}

static FALLIBLE enum err find_in(struct replicas *r, const struct sdict *held, const struct sd_tensor *t,
				 const struct sd_tensor *p, struct map *boxes)
{
	for (uint64_t c = p->first_chunk; c < p->first_chunk + p->chunk_count; c++)
		TRY(map_put(boxes, box_key(&r->plan->chunks[c], p->ndim), (uint32_t)c));
	for (uint64_t c = t->first_chunk; c < t->first_chunk + t->chunk_count; c++) {
		const struct sd_chunk *h = &held->chunks[c];
		uint32_t at = map_get(boxes, box_key(h, t->ndim));
		if (at == MAP_NONE)
			continue; /* empty boxes are not written */
		const struct sd_chunk *w = &r->plan->chunks[at];
		if (w->loc.file != h->loc.file || w->loc.offset != h->loc.offset)
			TRY(add(r, t, h, at));
	}
	return OK;
}

enum err replicas_find(struct job *j, const struct sdict *held, const struct sdict *plan, const enum dtype *dtypes,
		       struct replicas *out)
{
	out->job = j;
	out->plan = plan;
	TRY(sdict_new(UINT64_MAX, &out->sd));
	TRY(sdict_copy_files(out->sd, held));
	for (uint64_t i = 0; i < held->tensor_count; i++) {
		const struct sd_tensor *t = &held->tensors[i], *p = sdict_tensor(plan, t->fqn);
		struct map boxes = { 0 };
		if (!p || dtypes[i] != t->dtype || t->chunk_count == p->chunk_count)
			continue;
		enum err e = find_in(out, held, t, p, &boxes);
		map_free(&boxes);
		TRY(e);
	}
	return OK;
}

static uint32_t crc_of(const struct run *run, const struct run_src *s)
{
	const struct run_scan *scans = &run->scans[s->first_scan];
	uint32_t crc = s->scan_count ? scans[0].crc32 : 0;

	for (uint32_t i = 1; i < s->scan_count; i++)
		crc = digest_crc32_combine(crc, scans[i].crc32, scans[i].end - scans[i].begin);
	return crc;
}

/* {"fqn","offsets","ranks":[writer, …],"digests":["crc32:…", …]}: the writer's comes first. */
static json_t *entry_of(const struct replicas *r, uint32_t plan_chunk, uint32_t crc)
{
	const struct sd_chunk *c = &r->plan->chunks[plan_chunk];
	const struct sd_tensor *t = &r->plan->tensors[c->tensor];

	return json_pack("{s:o, s:o, s:[I], s:[o]}", "fqn", jtext_value(t->fqn), "offsets", jtext_numbers(c->dims, t->ndim), "ranks",
			 (json_int_t)c->rank, "digests", json_sprintf("crc32:%08x", crc));
}

static json_t *find_entry(const struct replicas *r, json_t **entries, uint32_t plan_chunk, uint32_t crc)
{
	if (!entries[plan_chunk] && json_array_size(r->list) < DIVERGENT_MAX) {
		entries[plan_chunk] = entry_of(r, plan_chunk, crc);
		json_array_append_new(r->list, entries[plan_chunk]);
	}
	return entries[plan_chunk];
}

enum err replicas_compare(void *user, const struct run *run, const struct build_place *places)
{
	struct replicas *r = user;
	CLEANUP(mem_free_ptr) json_t **entries = mem_zalloc(r->plan->chunk_count, sizeof *entries);

	NEED(entries, "no memory to compare replicas");
	for (uint64_t i = 0; i < r->count; i++) {
		uint32_t written = run->dsts[places[r->plan_chunk[i]].dst].crc32;
		uint32_t crc = crc_of(run, &run->srcs[r->first_src + i]);
		const struct sd_chunk *c = &r->sd->chunks[i];
		if (crc == written)
			continue;
		struct str fqn = r->sd->tensors[c->tensor].fqn;
		if (r->fail)
			return differ(r->plan->chunks[r->plan_chunk[i]].rank, c->rank, fqn);
		json_t *entry = find_entry(r, entries, r->plan_chunk[i], written);
		if (entry)
			add_digest(entry, c->rank, crc);
	}
	return OK;
}
