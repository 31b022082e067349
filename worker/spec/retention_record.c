/* retention_record.c: see retention_record.h. What a record does not say is read so that nothing goes for want of it. */
#include "spec/retention_record.h"

#include "base/clock.h"
#include "base/jval.h"
#include "base/map.h"
#include "spec/derived.h"

static int64_t time_of(const json_t *record)
{
	int64_t ms;

	return clock_of_text(jval_str(record, "durable_at").p, &ms) || clock_of_text(jval_str(record, "modified_at").p, &ms) ? ms : -1;
}

static uint64_t size_in(const json_t *record, const char *key)
{
	json_int_t v = json_integer_value(json_object_get(record, key));

	return v > 0 ? (uint64_t)v : 0;
}

/* The number at the end of the name, as server/runs.h has it. */
static int64_t step_of(const json_t *record, struct str name)
{
	const json_t *step = json_object_get(record, "step");
	size_t at = name.n;
	uint64_t number;

	if (json_is_integer(step))
		return json_integer_value(step) < 0 ? -1 : json_integer_value(step);
	while (at > 0 && name.p[at - 1] >= '0' && name.p[at - 1] <= '9')
		at--;
	return str_to_u64((struct str){ name.p + at, name.n - at }, &number) && number <= INT64_MAX ? (int64_t)number : -1;
}

static FALLIBLE enum err read_base(const json_t *record, struct str storage, struct arena *a, struct retention_record *out)
{
	const json_t *one;
	size_t i;

	json_array_foreach(json_object_get(record, "parents"), i, one) {
		struct str of = jval_str(one, "storage");
		if (out->base.n || !str_is(jval_str(one, "role"), "base"))
			continue;
		TRY(arena_str(a, of.n ? of : storage, &out->base_storage));
		TRY(arena_str(a, jval_str(one, "name"), &out->base));
	}
	return OK;
}

/* Bytes that an incremental save took from an earlier checkpoint of its own storage. */
static FALLIBLE enum err read_shared(const json_t *record, struct arena *a, struct retention_record *out)
{
	const json_t *one;
	size_t i;

	out->shared = size_in(record, "bytes_shared");
	if (out->shared > out->bytes)
		out->shared = out->bytes;
	json_array_foreach(json_object_get(record, "parents"), i, one)
		if (out->shared && out->shared_with.n == 0 && str_is(jval_str(one, "role"), "previous"))
			TRY(arena_str(a, jval_str(one, "job"), &out->shared_with));
	out->bytes -= out->shared;
	return OK;
}

static unsigned facts_of(const json_t *record, bool *is_verified)
{
	const json_t *hold = json_object_get(record, "hold");
	struct str state = jval_str(json_object_get(record, "verified"), "state");
	unsigned facts = 0;

	*is_verified = str_is(state, "verified");
	if (json_is_object(hold)) /* without an owner: its notes cannot be read */
		facts |= RETAIN_BIT(HELD) | (json_is_null(json_object_get(hold, "owner")) ? RETAIN_BIT(UNREADABLE) : 0);
	if (str_is(state, "damaged") || jval_str(record, "format").n == 0)
		facts |= RETAIN_BIT(UNREADABLE);
	return facts;
}

FALLIBLE enum err retention_record_read(const json_t *record, struct str storage, struct arena *a, struct retention_record *out,
					struct str *etag_out)
{
	const json_t *metrics = json_object_get(record, "metrics");
	struct str name = jval_str(record, "name");

	if (name.n == 0)
		return ERR(VALIDATION_FAILED, "a record without a name");
	*out = (struct retention_record){ .storage = storage, .durable_ms = time_of(record), .step = step_of(record, name),
					  .bytes = size_in(record, "bytes"),
					  .metrics = json_is_object(metrics) ? metrics : NULL,
					  .is_delta = str_is(jval_str(record, "format"), "delta") };
	out->facts = facts_of(record, &out->is_verified);
	TRY(arena_str(a, name, &out->name));
	int64_t of_ms = derived_ms(record, out->name.p);
	out->is_derived = of_ms >= 0 && of_ms < out->durable_ms;
	size_t at = out->name.n;
	while (at > 0 && out->name.p[at - 1] != '/')
		at--;
	out->run = at > 0 ? (struct str){ out->name.p, at - 1 } : STR("-");
	TRY(arena_str(a, jval_str(json_object_get(record, "made_by"), "job"), &out->job));
	TRY(arena_str(a, jval_str(record, "etag"), etag_out));
	TRY(read_shared(record, a, out));
	return read_base(record, storage, a, out);
}

static FALLIBLE enum err job_key(struct str storage, struct str job, struct arena *a, struct str *out)
{
	return arena_printf(a, out, "%.*s:%.*s", (int)storage.n, storage.p, (int)job.n, job.p);
}

FALLIBLE enum err retention_records_share(struct retention_record *all, uint64_t n, struct arena *a)
{
	CLEANUP(map_free) struct map made = { 0 };
	bool any = false;
	struct str key;

	for (uint64_t i = 0; i < n; i++)
		any = any || all[i].shared_with.n;
	for (uint64_t i = 0; i < n && any; i++) {
		if (all[i].job.n == 0)
			continue;
		TRY(job_key(all[i].storage, all[i].job, a, &key));
		TRY(map_put(&made, key, 1));
	}
	for (uint64_t i = 0; i < n && any; i++) {
		struct retention_record *r = &all[i];
		if (r->shared_with.n == 0)
			continue;
		TRY(job_key(r->storage, r->shared_with, a, &key));
		r->bytes += map_get(&made, key) == MAP_NONE ? r->shared : 0;
	}
	return OK;
}
