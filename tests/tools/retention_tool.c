/* retention_tool.c: spec/retention.h for tests in Python: a question as JSON on each line of standard input, an answer on each line of
 * standard output.
 *
 *     {"records":[{record as in GET /v1/checkpoints, "storage", "facts":["alias"]}],"policies":[{policy}],"now":MS,"sane":true}
 *     {"go":[{"record":3,"policy":0,"why":"ttl"}],"kept":[["last"],[]],"over":[0]} */
#include <stdio.h>
#include <stdlib.h>

#include "base/jtext.h"
#include "base/mem.h"
#include "spec/retention_record.h"

enum { LINE_MAX_BYTES = 64 << 20 };

static void fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, err_last()->text);
	exit(1);
}

static unsigned facts_of(const json_t *names)
{
	unsigned facts = 0;
	json_t *name;
	size_t i;

	json_array_foreach(names, i, name)
		for (int k = 0; k < RETAIN_COUNT; k++)
			if (strcmp(retention_reasons[k], json_string_value(name)) == 0)
				facts |= 1u << k;
	return facts;
}

static json_t *answer(const struct retention *r, uint64_t n, uint32_t policy_count)
{
	json_t *go = json_array(), *kept = json_array(), *over = json_array();

	for (uint64_t i = 0; i < r->removal_count; i++) {
		const struct retention_verdict *v = &r->verdicts[r->removals[i]];
		json_array_append_new(go, json_pack("{s:I, s:i, s:s}", "record", (json_int_t)r->removals[i], "policy", (int)v->policy,
						    "why", retention_whys[v->why]));
	}
	for (uint64_t i = 0; i < n; i++) {
		json_t *why = json_array();
		for (int k = 0; k < RETAIN_COUNT; k++)
			if (r->verdicts[i].kept >> k & 1)
				json_array_append_new(why, json_string(retention_reasons[k]));
		json_array_append_new(kept, why);
	}
	for (uint32_t k = 0; k < policy_count; k++)
		json_array_append_new(over, json_integer((json_int_t)r->sums[k].over));
	return json_pack("{s:o, s:o, s:o}", "go", go, "kept", kept, "over", over);
}

static void ask(json_t *question)
{
	json_t *records = json_object_get(question, "records"), *policies = json_object_get(question, "policies"), *one;
	size_t n = json_array_size(records), count = json_array_size(policies), i;
	struct retention_record *all = mem_zalloc(n, sizeof *all);
	struct policy *rules = mem_zalloc(count, sizeof *rules);
	struct arena *arena = arena_new(LINE_MAX_BYTES);
	struct retention_now now = { .wall_ms = json_integer_value(json_object_get(question, "now")),
				     .is_sane = json_is_true(json_object_get(question, "sane")) };
	struct retention result;
	struct str etag;

	json_array_foreach(records, i, one) {
		if (retention_record_read(one, str_of(json_string_value(json_object_get(one, "storage"))), arena, &all[i], &etag))
			fail("a record");
		all[i].facts |= facts_of(json_object_get(one, "facts"));
	}
	if (retention_records_share(all, n, arena))
		fail("shared bytes");
	json_array_foreach(policies, i, one)
		if (policy_read(one, &rules[i]))
			fail("a policy");
	if (retention_evaluate(all, n, rules, (uint32_t)count, &now, &result))
		fail("evaluation");
	json_t *doc = answer(&result, n, (uint32_t)count);
	char *text = jtext_of(doc);
	puts(text);
	fflush(stdout);
	json_decref(doc);
	mem_free(text);
	mem_free(all);
	mem_free(rules);
	arena_free(arena);
	retention_free(&result);
}

int main(void)
{
	char *line = NULL;
	size_t room = 0;
	ssize_t n;

	jtext_init();
	while ((n = getline(&line, &room, stdin)) > 0) {
		json_t *question = NULL;
		if (jtext_parse((struct str){ line, (size_t)n }, 0, &question))
			fail("a question");
		ask(question);
		json_decref(question);
	}
	return 0;
}
