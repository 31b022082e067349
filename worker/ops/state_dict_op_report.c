/* state_dict_op_report.c: see state_dict_op_report.h. */
#include "ops/state_dict_op_report.h"
#include "base/jtext.h"
#include "runner/target.h"

enum { NOTES_MAX = 10000 };

static FALLIBLE enum err put_notes(json_t *result, const struct state_dict_op_plan *p)
{
	static const char *const names[] = { [STATE_DICT_OP_NOTE_CAST] = "cast", [STATE_DICT_OP_NOTE_RESIZED] = "resized",
					     [STATE_DICT_OP_NOTE_MISSING] = "missing", [STATE_DICT_OP_NOTE_DROPPED] = "dropped" };

	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		json_object_set_new(result, names[i], json_array());
	for (uint64_t i = 0; i < p->note_count && i < NOTES_MAX; i++) {
		const struct state_dict_op_note *n = &p->notes[i];
		json_t *one = json_pack("{s:o, s:I}", "path", jtext_value(n->path), "rank", (json_int_t)n->rank);
		if (n->from.p)
			json_object_set_new(one, "from", jtext_value(n->from));
		if (n->to.p)
			json_object_set_new(one, "to", jtext_value(n->to));
		if (json_array_append_new(json_object_get(result, names[n->what]), one) < 0)
			return ERR(NO_MEMORY, "no memory for a report");
	}
	return OK;
}

static FALLIBLE enum err put_differences(json_t *result, const struct state_dict_op_plan *p)
{
	json_t *list = json_array();

	json_object_set_new(result, "equal", json_boolean(p->equal));
	json_object_set_new(result, "difference_count", json_integer((json_int_t)p->difference_total));
	json_object_set_new(result, "differences", list);
	each(d, p->differences, p->difference_count) {
		json_t *one = json_pack("{s:o, s:o, s:o, s:o, s:I}", "path", jtext_value(d->path), "what", jtext_value(d->what), "a",
					d->a.p ? jtext_value(d->a) : json_null(), "b", d->b.p ? jtext_value(d->b) : json_null(), "rank",
					(json_int_t)d->rank);
		if (json_array_append_new(list, one) < 0)
			return ERR(NO_MEMORY, "no memory for a report");
	}
	return OK;
}

enum err state_dict_op_report_plan(struct job *j, const struct state_dict_op_request *rq, const struct state_dict_op_plan *p)
{
	json_object_set_new(j->result, "world_size", json_integer(rq->target_world ? rq->target_world : rq->world_size));
	if (rq->kind == JOB_COMPARE)
		return put_differences(j->result, p);
	json_object_set_new(j->result, "bytes", json_integer((json_int_t)p->bytes_total));
	json_object_set_new(j->result, "needed_bytes", json_integer((json_int_t)p->bytes_needed));
	json_object_set_new(j->result, "moved_bytes", json_integer(0));
	if (rq->layout_use && rq->layout_use->tensors) /* else nothing was cut: the target was there */
		TRY(target_report_rules(j->result, rq->layout, rq->layout_use));
	return put_notes(j->result, p);
}

/* ----------------------------------------------------------------------------------------------------- compare */

static json_t *real_doc(uint64_t bits)
{
	double v;

	memcpy(&v, &bits, sizeof v);
	json_t *doc = json_real(v);
	return doc ? doc : json_string(v != v ? "nan" : "inf");
}

/* Coordinates in the whole tensor of element `linear` of a shard. */
static json_t *global_index(const struct state_dict_op_place *p, uint64_t linear)
{
	json_t *list = json_array();

	for (uint32_t i = p->ndim; i-- > 0;) {
		uint64_t size = (uint64_t)p->dims[p->ndim + i];
		json_array_insert_new(list, 0, json_integer(p->dims[i] + (int64_t)(linear % size)));
		linear /= size;
	}
	return list;
}

static uint64_t larger(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}

/* Shards of one tensor and rank lie side by side: one entry for them. */
static FALLIBLE enum err put_tensor(json_t *list, const struct run *run, const struct state_dict_op_places *places, uint64_t first,
				    uint64_t end)
{
	uint64_t count = 0, max_abs = 0, max_rel = 0;
	json_t *index = NULL;

	for (uint64_t i = first; i < end; i++) {
		const struct run_src *s = &run->srcs[i];
		uint64_t n = atomic_load(&s->diff_count);
		if (n && !index)
			index = global_index(&places->v[i], atomic_load(&s->diff_first) - 1);
		count += n;
		max_abs = larger(max_abs, atomic_load(&s->diff_max_abs));
		max_rel = larger(max_rel, atomic_load(&s->diff_max_rel));
	}
	if (!count)
		return OK;
	const struct state_dict_op_place *p = &places->v[first];
	json_t *one = json_pack("{s:o, s:s, s:n, s:n, s:I, s:I, s:o, s:o, s:o}", "path", jtext_value(p->fqn), "what", "values", "a", "b",
				"rank", (json_int_t)p->rank, "count", (json_int_t)count, "max_abs", real_doc(max_abs), "max_rel",
				real_doc(max_rel), "first_index", index);
	return json_array_append_new(list, one) < 0 ? ERR(NO_MEMORY, "no memory for a report") : OK;
}

static FALLIBLE enum err put_values(struct job *j, const struct run *run, const struct state_dict_op_places *places)
{
	json_t *list = json_object_get(j->result, "differences");
	size_t before = json_array_size(list);

	for (uint64_t i = 0, end; i < places->n; i = end) {
		const struct state_dict_op_place *p = &places->v[i];
		for (end = i + 1; end < places->n; end++) {
			const struct state_dict_op_place *q = &places->v[end];
			if (q->rank != p->rank || q->dict != p->dict || !str_eq(q->fqn, p->fqn))
				break;
		}
		TRY(put_tensor(list, run, places, i, end));
	}
	json_int_t more = (json_int_t)(json_array_size(list) - before);
	json_int_t count = json_integer_value(json_object_get(j->result, "difference_count")) + more;
	json_object_set_new(j->result, "difference_count", json_integer(count));
	json_object_set_new(j->result, "compared_bytes", json_integer((json_int_t)run_bytes_total(run)));
	if (more)
		json_object_set_new(j->result, "equal", json_false());
	return OK;
}

enum err state_dict_op_report_run(struct job *j, const struct run *run, const struct state_dict_op_places *places, bool compare)
{
	if (compare)
		return put_values(j, run, places);
	json_object_set_new(j->result, "moved_bytes", json_integer((json_int_t)atomic_load(&run->head->moved_bytes)));
	return OK;
}
