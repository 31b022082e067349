/* plan_doc.c: see plan_doc.h. */
#include "runner/plan_doc.h"

#include "base/jtext.h"
#include "base/num.h"
#include "tensor/quant.h"

enum { FILES_SHOWN = 256, CUTS_SHOWN = 256, CUT_CHUNKS_SHOWN = 4096 };

struct part {
	uint64_t lo, hi, needed;       /* elements of a source chunk */
};

/* The part of source chunk s that target chunk t needs, as a range of its elements in C order. */
static void widen(uint32_t n, const int64_t *s, const int64_t *t, struct part *p)
{
	int64_t off[NDIM_MAX], size[NDIM_MAX];
	uint64_t first = 0, last = 0;

	if (!box_intersect(n, s, s + n, t, t + n, off, size))
		return;
	for (uint32_t d = 0; d < n; d++) { /* inside a tensor whose bytes can be counted */
		uint64_t pitch = (uint64_t)s[n + d], at = (uint64_t)(off[d] - s[d]);
		first = first * pitch + at;
		last = last * pitch + at + (uint64_t)size[d] - 1;
	}
	p->lo = p->hi ? num_min(p->lo, first) : first;
	p->hi = num_max(p->hi, last + 1);
	p->needed += box_volume(n, size);
}

/* Stored bytes of so many elements of a chunk, in whole blocks if it has such. */
static uint64_t stored_bytes(const struct sdict *sd, const struct sd_chunk *c, uint64_t elements)
{
	const struct sd_strided *view = sd_strided_of(sd, c->loc);

	return view && view->q8_0 ? num_div_up(elements, QUANT_Q8_0_FLOATS) * QUANT_Q8_0_BYTES
				  : elements * dtype_bytes(sd->tensors[c->tensor].dtype);
}

enum err plan_figures_make(const struct sdict *source, const struct sdict *target, const struct load_plan *plan,
			   struct plan_figures *out)
{
	CLEANUP(mem_free_ptr) struct part *parts = mem_zalloc(source->chunk_count, sizeof *parts);

	*out = (struct plan_figures){ 0 };
	NEED(parts, "no memory for %ju chunks", (uintmax_t)source->chunk_count);
	for (uint64_t i = 0; i < target->chunk_count; i++)
		for (uint64_t k = plan->first[i]; k < plan->first[i + 1]; k++) {
			const struct sd_chunk *s = &source->chunks[plan->sources[k]];
			widen(source->tensors[s->tensor].ndim, s->dims, target->chunks[i].dims, &parts[plan->sources[k]]);
		}
	for (uint64_t i = 0; i < source->chunk_count; i++) {
		const struct sd_chunk *c = &source->chunks[i];
		uint64_t span = stored_bytes(source, c, parts[i].hi - parts[i].lo);
		uint64_t needed = num_min(stored_bytes(source, c, parts[i].needed), span); /* replicas need the same bytes */
		bool sparse = needed * 2 < span && span > BUILD_SMALL_BYTES;
		out->needed_bytes += needed;
		out->read_bytes += sparse ? needed : span;
	}
	return OK;
}

static uint64_t table_bytes(const struct run_build *b)
{
	uint64_t n = sizeof(struct run_head);

#define X(type, name) n += b->name.n * sizeof(type);
	RUN_TABLES(X)
#undef X
	return n;
}

uint64_t plan_sdict_bytes(const struct sdict *sd)
{
	return sd ? sd->array_bytes + arena_used(sd->arena) : 0;
}

/* Bytes that the job will read from files. A load that compares digests reads its scans alone; a job that writes files, or fills what
 * conversion rules make, reads its scans, for the checks, and then all that it copies. */
static uint64_t read_bytes(const struct run_build *b, const struct plan_figures *f)
{
	bool scans_alone = b->opts.mode == RUN_FILL_SEGMENTS && b->opts.verify;
	uint64_t scanned = 0;

	for (uint64_t i = 0; i < b->scans.n; i++) {
		const struct run_src *s = &b->srcs.v[b->scans.v[i].src];
		if (b->files.v[s->file].kind == RUN_FILE_SOURCE || b->files.v[s->file].kind == RUN_FILE_SPOOL)
			scanned += b->scans.v[i].end - b->scans.v[i].begin;
		else if (b->files.v[s->file].kind == RUN_FILE_SEGMENT)
			scans_alone = false;
	}
	if (b->opts.mode == RUN_FILL_SEGMENTS && !b->opts.verify)
		return f->read_bytes;
	return scanned + (scans_alone ? 0 : f->read_bytes);
}

static FALLIBLE enum err set(json_t *doc, const char *key, json_t *value_new)
{
	return json_object_set_new(doc, key, value_new) == 0 ? OK : ERR(NO_MEMORY, "no memory for the plan");
}

enum err plan_doc_figures(json_t *doc, const struct job *j, const struct run_build *b, const struct plan_figures *f,
			  uint64_t metadata_bytes)
{
	uint64_t bytes = read_bytes(b, f);
	uint64_t buffers = num_min(j->worker->memory_bytes, 2 * bytes + (1 << 20)) * j->worker->count;
	double ratio = f->needed_bytes ? (double)bytes / (double)f->needed_bytes : 1.0;

	TRY(set(doc, "needed_bytes", json_integer((json_int_t)f->needed_bytes)));
	TRY(set(doc, "read_bytes", json_integer((json_int_t)bytes)));
	TRY(set(doc, "over_read_ratio", json_real(ratio)));
	/* the tables are there twice while they are shared */
	return set(doc, "peak_memory_bytes", json_integer((json_int_t)(buffers + 2 * table_bytes(b) + metadata_bytes)));
}

enum err plan_doc_files(json_t *doc, const struct run_build *b, enum run_file_kind kind)
{
	json_t *files = json_array(), *ranks = json_array();
	uint64_t count = 0;

	each(f, b->files.v, b->files.n) {
		if (f->kind != kind || f->spare || count++ >= FILES_SHOWN)
			continue;
		json_array_append_new(files, json_pack("{s:s%, s:I, s:I}", "name", b->strings.v + f->name_at, (size_t)f->name_len,
						       "rank", (json_int_t)f->rank, "bytes", (json_int_t)f->bytes));
	}
	for (uint64_t i = 0; i < b->ranks.n && i < FILES_SHOWN; i++)
		json_array_append_new(ranks, json_pack("{s:I, s:I}", "rank", (json_int_t)b->ranks.v[i].rank, "bytes",
						       (json_int_t)b->ranks.v[i].bytes_total));
	enum err e = set(doc, "files", files);
	e = e ?: set(doc, "file_count", json_integer((json_int_t)count));
	if (e) {
		json_decref(ranks);
		return e;
	}
	return set(doc, "ranks", ranks);
}

static json_t *chunk_of(const struct sd_chunk *c, uint32_t ndim)
{
	return json_pack("{s:I, s:o, s:o}", "rank", (json_int_t)c->rank, "offsets", jtext_numbers(c->dims, ndim), "sizes",
			 jtext_numbers(c->dims + ndim, ndim));
}

enum err plan_doc_cuts(json_t *doc, const struct sdict *target)
{
	json_t *list = json_array();
	uint64_t chunks = 0;

	TRY(set(doc, "cuts", list));
	for (uint64_t i = 0; i < target->tensor_count && i < CUTS_SHOWN; i++) {
		const struct sd_tensor *t = &target->tensors[i];
		chunks += t->chunk_count;
		if (chunks > CUT_CHUNKS_SHOWN)
			break;
		json_t *boxes = json_array();
		json_t *x = json_pack("{s:o, s:s, s:o, s:o}", "fqn", jtext_value(t->fqn), "dtype", dtype_name(t->dtype), "shape",
				      jtext_numbers(t->shape, t->ndim), "chunks", boxes);
		if (!x || json_array_append_new(list, x) != 0)
			return ERR(NO_MEMORY, "no memory for the plan");
		for (uint32_t k = 0; k < t->chunk_count; k++)
			if (json_array_append_new(boxes, chunk_of(&target->chunks[t->first_chunk + k], t->ndim)) != 0)
				return ERR(NO_MEMORY, "no memory for the plan");
	}
	return OK;
}

static FALLIBLE enum err add_problem(json_t *list, const struct problem *p)
{
	json_t *x = json_pack("{s:s, s:o, s:o}", "code", err_code_name(p->code), "fqn", jtext_value(p->fqn), "detail",
			      jtext_value(p->text));

	if (!x || json_array_append_new(list, x) < 0)
		return ERR(NO_MEMORY, "no memory for the plan");
	if (p->rank >= 0)
		TRY(set(x, "rank", json_integer(p->rank)));
	if (p->expected.n)
		TRY(set(x, "expected", jtext_value(p->expected)));
	return p->actual.n ? set(x, "actual", jtext_value(p->actual)) : OK;
}

enum err plan_doc_problems(json_t *doc, const struct problems *p)
{
	json_t *list = json_array();

	TRY(set(doc, "problems", list));
	for (uint64_t i = 0; i < p->list.n; i++)
		TRY(add_problem(list, &p->list.v[i]));
	return set(doc, "problem_count", json_integer((json_int_t)p->count));
}
