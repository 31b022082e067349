/* test_spec.c: JSON readers, references, layouts and job specs: what is accepted, and the place named when it is not. */
#include "lib/t_spec.h"

#include <string.h>

#include "spec/layout_rules.h"
#include "api/problem.h"
#include "spec/ref.h"
#include "tensor/dtype.h"

static void test_parse(void **state)
{
	json_t *doc = NULL;
	char deep[80];

	(void)state;
	T_ERR(INVALID_JSON, jval_parse(STR(""), &doc));
	T_ERR(INVALID_JSON, jval_parse(STR("[1]"), &doc));
	T_ERR(INVALID_JSON, jval_parse(STR("{\"a\":NaN}"), &doc));
	assert_non_null(strstr(err_last()->text, "line 1, column"));
	T_ERR(INVALID_JSON, jval_parse(STR("{\"a\":Infinity}"), &doc));
	T_ERR(INVALID_JSON, jval_parse(STR("{\"a\":1,\"a\":2}"), &doc));
	T_ERR(INVALID_JSON, jval_parse(STR("{\"a\":1} x"), &doc));
	T_ERR(INVALID_JSON, jval_parse(STR("{\"a\":\"\\u0000\"}"), &doc));
	T_ERR(INVALID_JSON, jval_parse(STR("{\"a\":1e999}"), &doc));
	memset(deep, '[', sizeof deep);
	T_ERR(INVALID_JSON, jval_parse((struct str){ deep, sizeof deep }, &doc));
	assert_non_null(strstr(err_last()->text, "nested"));
	T_OK(jval_parse(STR("{\"a\":\"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\"}"), &doc));
	json_decref(doc);
}

/* To JSON 7, 7.0 and 7e0 are one number; a number that fits no integer is for its field to refuse. */
static void test_numbers(void **state)
{
	json_t *doc = NULL;

	(void)state;
	T_OK(jval_parse(STR("{\"a\":7.0,\"b\":[7e0,7.5],\"c\":{\"d\":9223372036854775807}}"), &doc));
	assert_true(json_is_integer(json_object_get(doc, "a")) && json_integer_value(json_object_get(doc, "a")) == 7);
	assert_true(json_is_integer(json_array_get(json_object_get(doc, "b"), 0)));
	assert_true(json_is_real(json_array_get(json_object_get(doc, "b"), 1)));
	assert_true(json_integer_value(json_object_get(json_object_get(doc, "c"), "d")) == INT64_MAX);
	json_decref(doc);
	T_OK(jval_parse(STR("{\"a\":99999999999999999999,\"b\":3}"), &doc));
	assert_true(json_is_real(json_object_get(doc, "a")) && json_is_integer(json_object_get(doc, "b")));
	json_decref(doc);
}

static void test_names(void **state)
{
	char long_part[202];

	(void)state;
	T_OK(ref_check_name(STR("run1/step-100")));
	T_OK(ref_check_name(STR("r\xc3\xa9sum\xc3\xa9/a:b=c@d")));
	T_ERR(NAME_INVALID, ref_check_name(STR("")));
	T_ERR(NAME_INVALID, ref_check_name(STR("../etc")));
	T_ERR(NAME_INVALID, ref_check_name(STR("a/../b")));
	T_ERR(NAME_INVALID, ref_check_name(STR("/etc/passwd")));
	T_ERR(NAME_INVALID, ref_check_name(STR("a/")));
	T_ERR(NAME_INVALID, ref_check_name(STR("a//b")));
	T_ERR(NAME_INVALID, ref_check_name(STR(".hidden")));
	T_ERR(NAME_INVALID, ref_check_name(STR("a/-rf")));
	T_ERR(NAME_INVALID, ref_check_name(STR("a\nb")));
	T_ERR(NAME_INVALID, ref_check_name(STR("a\0b")));
	T_ERR(NAME_INVALID, ref_check_name(STR("a\xff")));
	T_ERR(NAME_INVALID, ref_check_name(STR("-@best")));
	T_OK(ref_check_meant(STR("-@best")));
	T_OK(ref_check_meant(STR("-@latest-verified")));
	T_OK(ref_check_meant(STR("run1@best")));
	T_ERR(NAME_INVALID, ref_check_meant(STR("-")));
	T_ERR(NAME_INVALID, ref_check_meant(STR("-@")));
	T_ERR(NAME_INVALID, ref_check_meant(STR("-@-a")));
	T_ERR(NAME_INVALID, ref_check_meant(STR("-@a/b")));
	T_ERR(NAME_INVALID, ref_check_meant(STR("-x@best")));
	T_ERR(NAME_INVALID, ref_check_meant(STR("a/-@best")));
	T_OK(ref_check_name(STR("1/2/3/4/5/6/7/8/9/10/11/12/13/14/15/16")));
	T_ERR(NAME_INVALID, ref_check_name(STR("1/2/3/4/5/6/7/8/9/10/11/12/13/14/15/16/17")));
	memset(long_part, 'x', sizeof long_part);
	T_OK(ref_check_name((struct str){ long_part, 200 }));
	T_ERR(NAME_INVALID, ref_check_name((struct str){ long_part, 201 }));
	T_OK(ref_check_storage(STR("main-2_x")));
	T_ERR(NAME_INVALID, ref_check_storage(STR("shm")));
	T_ERR(NAME_INVALID, ref_check_storage(STR("Main")));
	T_ERR(NAME_INVALID, ref_check_storage(STR("a234567890123456789012345678901234")));
	T_ERR(NAME_INVALID, ref_check_state_dict(STR("a/b")));
}

static void test_references(void **state)
{
	struct ref r;

	(void)state;
	T_OK(ref_parse(STR("main:run1/a:b"), &r));
	assert_true(r.kind == REF_CHECKPOINT && str_is(r.storage, "main") && str_is(r.name, "run1/a:b"));
	T_OK(ref_parse(STR("shm:train"), &r));
	assert_true(r.kind == REF_STATE_DICT && str_is(r.name, "train"));
	T_ERR(NAME_INVALID, ref_parse(STR("main"), &r));
	T_ERR(NAME_INVALID, ref_parse(STR("main:/etc"), &r));
	T_ERR(NAME_INVALID, ref_parse(STR(":x"), &r));
}

static void test_kinds(void **state)
{
	enum job_kind k;

	(void)state;
	for (int i = 0; i < JOB_KIND_COUNT; i++) {
		assert_true(kind_parse(str_of(kind_names[i]), &k) && (int)k == i);
		assert_string_equal(kind_of(k)->name, kind_names[i]);
		assert_true(kind_of(k)->reads || kind_of(k)->writes); /* else it would do nothing */
		assert_true(!kind_is(k, KIND_COMPARES) || !kind_of(k)->writes);
	}
	assert_null(kind_names[JOB_KIND_COUNT]);
	assert_false(kind_parse(STR("sav"), &k));
	assert_false(kind_parse(STR(""), &k));
	assert_null(kind_of(JOB_KIND_COUNT)->name);
	assert_false(kind_is((enum job_kind)-1, ~0u));
}

static void test_placements(void **state)
{
	(void)state;
	static const char *const good[] = { "Shard(0)", "Shard(dim=0)", "S(0)", "S(-1)", "Replicate()", "R", " Shard( dim = 1 ) ",
					    "_StridedShard(dim=0, sf=2)", "_StridedShard(0, 2)",
					    "_StridedShard(dim=0, split_factor=2)", "_S(-1, 1099511627776)", "R()" };
	static const char *const partial[] = { "Partial()", "P", "Partial(sum)", "P(avg)",
					      "_Partial(reduce_op='max')", "Partial(\"min\")" };
	static const char *const bad[] = { "", "Shard", "Shard()", "Shard(x)", "Shard(0", "Shard(0))", "Rx", "Partial(band)", "Px",
					   "shard(0)", "Shard(--1)", "Shard(9999999)", "_StridedShard(0)", "_S(0, 0)", "_S(0, -1)",
					   "_S(0, 9999999999999999999)", "Replicate(0)", "Partial('sum)" };

	struct placement p;

	for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
		T_OK(placement_parse(str_of(good[i]), &p));
		assert_int_not_equal(p.kind, PLACE_PARTIAL);
	}
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		T_ERR(LAYOUT_INVALID, placement_parse(str_of(bad[i]), &p));
	for (size_t i = 0; i < sizeof partial / sizeof *partial; i++) {
		T_OK(placement_parse(str_of(partial[i]), &p));
		assert_int_equal(p.kind, PLACE_PARTIAL);
	}
}

static enum err check_in_memory(const char *rules, int64_t *world)
{
	CLEANUP(jval_drop) json_t *doc = json_loads(rules, 0, NULL);
	CLEANUP(arena_free_ptr) struct arena *a = arena_new(1 << 20);
	struct jval root = JVAL_ROOT(doc);
	struct layout_rules read;

	TRY(layout_rules_read(&root, 10, a, &read));
	return layout_rules_check(&root, &read, true, world);
}

static void test_partial_in_memory(void **state)
{
	int64_t world = 0;

	(void)state;
	T_OK(check_in_memory("[{\"match\":\"*\",\"mesh\":[2,2],\"placements\":[\"Partial(max)\",\"P(max)\"]}]", &world));
	assert_int_equal(world, 4);
	T_ERR(LAYOUT_INVALID, check_in_memory("[{\"match\":\"*\",\"placements\":[\"Partial(xor)\"]}]", &world));
}

#define SRC "\"source\":{\"storage\":\"main\",\"name\":\"a\"}"
#define RESHARD(target) "{\"kind\":\"reshard\"," SRC ",\"target\":{\"storage\":\"main\",\"name\":\"b\"" target "}}"
#define LAYOUT(rules) RESHARD(",\"layout\":[" rules "]")

static void test_every_dtype(void **state)
{
	CLEANUP(spec_free) struct spec s = { 0 };

	(void)state;
	for (int d = 0; d < DT_COUNT; d++) {
		json_t *doc = t_spec_parse(RESHARD(""));
		json_object_set_new(doc, "dtype", json_pack("[[s,s]]", "*", dtype_name((enum dtype)d)));
		T_OK(spec_read(doc, &s));
		json_decref(doc);
	}
}

static void test_defaults(void **state)
{
	json_t *doc = t_spec_parse(RESHARD(",\"layout\":[{\"match\":\"*\",\"mesh\":[2,4],\"placements\":[\"R\",\"S(0)\"]}]"));
	CLEANUP(spec_free) struct spec s = { 0 };

	(void)state;
	T_OK(spec_read(doc, &s));
	assert_int_equal(s.kind, JOB_RESHARD);
	assert_true(str_is(s.target.name, "b"));
	json_t *target = json_object_get(doc, "target"), *options = json_object_get(doc, "options");
	assert_int_equal(json_integer_value(json_object_get(target, "world_size")), 8);
	assert_string_equal(json_string_value(json_object_get(target, "format")), "dcp");
	assert_true(json_is_false(json_object_get(options, "overwrite")));
	assert_int_equal(json_integer_value(json_object_get(options, "files_per_rank")), 1);
	assert_string_equal(json_string_value(json_object_get(options, "verify")), "digest");
	assert_int_equal(json_array_size(json_object_get(doc, "include")), 0);
	assert_true(json_is_array(json_object_get(doc, "dtype")));
	json_decref(doc);

	doc = t_spec_parse("{\"kind\":\"save\",\"source\":{\"state_dict\":\"train\",\"generation\":7},"
		    "\"target\":{\"storage\":\"main\",\"name\":\"x\"},\"options\":{\"on_divergence\":\"fail\"}}");
	T_OK(spec_read(doc, &s));
	assert_string_equal(json_string_value(json_object_get(json_object_get(doc, "options"), "on_divergence")), "fail");
	assert_string_equal(json_string_value(json_object_get(json_object_get(doc, "options"), "pace")), "full");
	json_decref(doc);
	doc = t_spec_parse("{\"kind\":\"load\"," SRC ",\"target\":{\"state_dict\":\"s\"}}");
	T_OK(spec_read(doc, &s));
	assert_true(json_is_true(json_object_get(doc, "strict")));
	json_decref(doc);
	doc = t_spec_parse("{\"kind\":\"diff\",\"a\":{\"state_dict\":\"s\"},\"b\":{\"storage\":\"main\",\"name\":\"x\"},\"rtol\":1}");
	T_OK(spec_read(doc, &s));
	assert_true(s.a.kind == REF_STATE_DICT && s.b.kind == REF_CHECKPOINT);
	json_decref(doc);
}

static json_t *minimal(enum job_kind kind)
{
	static const char *const refs[] = { "source", "target", "a", "b", "base" };
	const struct kind *k = kind_of(kind);
	bool compares = kind_is(kind, KIND_COMPARES);
	unsigned ends[] = { compares ? 0 : k->reads, k->writes, compares ? k->reads : 0, compares ? k->reads : 0,
			    kind_is(kind, KIND_HAS_BASE) ? REF_CHECKPOINT : 0 };
	json_t *doc = json_pack("{s:s}", "kind", k->name);

	if (kind == JOB_MERGE)
		json_object_set_new(doc, "sources", json_pack("[{s:s, s:s}, {s:s, s:s}]", "storage", "main", "name", "one", "storage",
							      "main", "name", "two"));
	if (kind == JOB_LOAD)
		json_object_set_new(doc, "spread", json_pack("{s:[s, s]}", "nodes", "one", "two"));
	for (size_t i = 0; i < 5; i++)
		if (ends[i] & REF_CHECKPOINT)
			json_object_set_new(doc, refs[i], json_pack("{s:s, s:s}", "storage", "main", "name", refs[i]));
		else if (ends[i])
			json_object_set_new(doc, refs[i], json_pack("{s:s}", "state_dict", refs[i]));
	return doc;
}

/* Each field has its own default, and only the kinds that its row names know it. */
static void test_every_field_of_every_kind(void **state)
{
	(void)state;
	for (int kind = 0; kind < JOB_KIND_COUNT; kind++) {
		json_t *doc = minimal((enum job_kind)kind);
		CLEANUP(spec_free) struct spec s = { 0 };
		T_OK(spec_read(doc, &s));
		assert_int_equal(s.kind, kind);
		for (const struct field *f = field_next((enum job_kind)kind, NULL); f; f = field_next((enum job_kind)kind, f)) {
			if (f->type == FIELD_CHECKPOINTS || strcmp(f->key, "nodes") == 0) /* must be given */
				continue;
			const char *place = field_place_key(f->place);
			json_t *value = json_object_get(place ? json_object_get(doc, place) : doc, f->key);
			json_t *want = f->fallback ? json_loads(f->fallback, JSON_DECODE_ANY, NULL) : NULL;
			if (want ? !json_equal(value, want) : value != NULL)
				T_FAIL("%s: %s has not its row's default", kind_names[kind], f->key);
			json_decref(want);
		}
		json_t *filled = json_deep_copy(doc);
		T_OK(spec_read(doc, &s)); /* as the worker and a restarted coordinator do */
		assert_true(json_equal(doc, filled));
		json_decref(filled);
		json_decref(doc);
	}
}

static void test_read_as_c(void **state)
{
	json_t *doc = t_spec_parse("{\"kind\":\"save\",\"source\":{\"state_dict\":\"train\",\"generation\":7},"
				   "\"target\":{\"storage\":\"main\",\"name\":\"x\"},\"include\":[\"a\"],"
				   "\"options\":{\"pace\":\"background\",\"dedup\":\"lowest_rank\","
				   "\"flatten_state_dict\":false,\"retries\":3}}");
	CLEANUP(spec_free) struct spec s = { 0 };

	(void)state;
	T_OK(spec_read(doc, &s));
	assert_true(s.source.kind == REF_STATE_DICT && s.source.generation == 7 && str_is(s.source.name, "train"));
	assert_true(s.pace == PACE_BACKGROUND && s.dedup == DEDUP_LOWEST_RANK && s.on_divergence == DIVERGENCE_REPORT && !s.flatten);
	assert_true(s.retries == 3 && s.files_per_rank == 1 && s.sync_files && !s.overwrite);
	assert_true(s.include.n == 1 && str_is(s.include.v[0], "a"));
	assert_int_equal(s.verify, READ_CHECK_DIGEST); /* a save has no such field: it is as if none was given */
	json_decref(doc);
	doc = t_spec_parse("{\"kind\":\"load\"," SRC ",\"target\":{\"state_dict\":\"s\"},\"options\":{\"verify\":\"none\"},"
			   "\"strict\":false,\"optimizer\":{\"key\":\"optim\",\"model\":{\"state_dict\":\"m\"}}}");
	T_OK(spec_read(doc, &s));
	assert_true(s.verify == READ_CHECK_NONE && !s.strict && s.source.generation == -1);
	T_OK(spec_read(doc, &s));
	assert_true(str_is(s.optimizer_key, "optim") && str_is(s.optimizer_model.name, "m") && s.world_size == 0);
	json_decref(doc);
}

static void test_older_names(void **state)
{
	static const char *const options[] = { "\"in_place\":\"needed\"", "\"beside\":\"needed\"",
					       "\"in_place\":\"needed\",\"beside\":\"needed\"" };
	CLEANUP(spec_free) struct spec s = { 0 };
	char text[512];

	(void)state;
	for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
		snprintf(text, sizeof text, "{\"kind\":\"save\",\"source\":{\"state_dict\":\"s\"},"
			 "\"target\":{\"storage\":\"m\",\"name\":\"x\"},\"options\":{%s}}", options[i]);
		json_t *doc = t_spec_parse(text);
		T_OK(spec_read(doc, &s));
		assert_int_equal(s.in_place, IN_PLACE_NEEDED);
		assert_string_equal(json_string_value(json_object_get(json_object_get(doc, "options"), "in_place")), "needed");
		T_OK(spec_read(doc, &s));
		json_decref(doc);
	}
	t_spec_refused(ERR_VALIDATION_FAILED, "/options/beside", "{\"kind\":\"save\",\"source\":{\"state_dict\":\"s\"},"
		       "\"target\":{\"storage\":\"m\",\"name\":\"x\"},\"options\":{\"beside\":\"needed\",\"in_place\":\"always\"}}");
}

static void test_refused_fields(void **state)
{
	(void)state;
	t_spec_refused(ERR_VALIDATION_FAILED, "/kind", "{}");
	t_spec_refused(ERR_UNKNOWN_KIND, "/kind", "{\"kind\":\"explode\"}");
	t_spec_refused(ERR_VALIDATION_FAILED, "/kind", "{\"kind\":3}");
	t_spec_refused(ERR_UNKNOWN_FIELD, "/sauce", "{\"kind\":\"verify\"," SRC ",\"sauce\":1}");
	t_spec_refused(ERR_VALIDATION_FAILED, "/source", "{\"kind\":\"verify\"}");
	t_spec_refused(ERR_VALIDATION_FAILED, "/source", "{\"kind\":\"verify\",\"source\":\"main:a\"}");
	t_spec_refused(ERR_VALIDATION_FAILED, "/level", "{\"kind\":\"verify\"," SRC ",\"level\":\"deep\"}");
	t_spec_refused(ERR_VALIDATION_FAILED, "/level", "{\"kind\":\"verify\"," SRC ",\"level\":null}");
	t_spec_refused(ERR_UNKNOWN_FIELD, "/source/path", "{\"kind\":\"verify\",\"source\":{\"path\":\"/etc\"}}");
	t_spec_refused(ERR_NAME_INVALID, "/source/name", "{\"kind\":\"verify\",\"source\":{\"storage\":\"m\",\"name\":\"../x\"}}");
	t_spec_refused(ERR_NAME_INVALID, "/source/storage", "{\"kind\":\"verify\",\"source\":{\"storage\":\"M\",\"name\":\"x\"}}");
	t_spec_refused(ERR_UNKNOWN_FIELD, "/source/state_dict", "{\"kind\":\"verify\",\"source\":{\"state_dict\":\"x\"}}");
	t_spec_refused(ERR_UNKNOWN_FIELD, "/target/format~1x", RESHARD(",\"format/x\":1"));
	t_spec_refused(ERR_VALIDATION_FAILED, "/target/format", RESHARD(",\"format\":\"zip\""));
	t_spec_refused(ERR_VALIDATION_FAILED, "/target/world_size", RESHARD(",\"world_size\":2.5"));
	t_spec_refused(ERR_VALIDATION_FAILED, "/target/world_size", RESHARD(",\"world_size\":0"));
	t_spec_refused(ERR_VALIDATION_FAILED, "/target/world_size", RESHARD(",\"world_size\":65537"));
	t_spec_refused(ERR_UNKNOWN_FIELD, "/options/force", "{\"kind\":\"delete\",\"target\":{\"storage\":\"m\",\"name\":\"x\"},"
						      "\"options\":{\"force\":true}}");
	t_spec_refused(ERR_VALIDATION_FAILED, "/rename/0", "{\"kind\":\"load\"," SRC ",\"target\":{\"state_dict\":\"s\"},"
						     "\"rename\":[[\"a\"]]}");
	t_spec_refused(ERR_VALIDATION_FAILED, "/dtype/0/1", "{\"kind\":\"load\"," SRC ",\"target\":{\"state_dict\":\"s\"},"
						      "\"dtype\":[[\"*\",\"bf16\"]]}");
	t_spec_refused(ERR_VALIDATION_FAILED, "/include/1", "{\"kind\":\"load\"," SRC ",\"target\":{\"state_dict\":\"s\"},"
						      "\"include\":[\"a\",2]}");
	t_spec_refused(ERR_VALIDATION_FAILED, "/labels/run", "{\"kind\":\"verify\"," SRC ",\"labels\":{\"run\":1}}");
	t_spec_refused(ERR_VALIDATION_FAILED, "/rtol", "{\"kind\":\"diff\",\"a\":{\"state_dict\":\"s\"},\"b\":{\"state_dict\":\"t\"},"
						 "\"rtol\":-1}");
	t_spec_refused(ERR_VALIDATION_FAILED, "/target",
		"{\"kind\":\"reshard\"," SRC ",\"target\":{\"storage\":\"main\",\"name\":\"a\"}}");
}

static void test_refused_layouts(void **state)
{
	(void)state;
	t_spec_refused(ERR_WORLD_MISMATCH, "/target/layout/0/mesh",
		RESHARD(",\"world_size\":3,\"layout\":[{\"match\":\"*\",\"mesh\":[2],\"placements\":[\"R\"]}]"));
	t_spec_refused(ERR_WORLD_MISMATCH, "/target/layout/1/mesh",
		LAYOUT("{\"match\":\"a\",\"mesh\":[2],\"placements\":[\"R\"]},"
		       "{\"match\":\"*\",\"mesh\":[4],\"placements\":[\"R\"]}"));
	t_spec_refused(ERR_LAYOUT_INVALID, "/target/layout/0/placements",
		LAYOUT("{\"match\":\"*\",\"mesh\":[2,2],\"placements\":[\"R\"]}"));
	t_spec_refused(ERR_LAYOUT_INVALID, "/target/layout/0/placements/0",
		LAYOUT("{\"match\":\"*\",\"mesh\":[2],\"placements\":[\"Partial()\"]}"));
	t_spec_refused(ERR_UNKNOWN_FIELD, "/target/layout/0/dim",
		LAYOUT("{\"match\":\"*\",\"mesh\":[2],\"placements\":[\"R\"],\"dim\":0}"));
	t_spec_refused(ERR_VALIDATION_FAILED, "/target/layout/0/match", LAYOUT("{\"mesh\":[2],\"placements\":[\"R\"]}"));
	t_spec_refused(ERR_WORLD_MISMATCH, "/target/layout/0/ranks/1",
		RESHARD(",\"world_size\":2,\"layout\":[{\"match\":\"*\",\"mesh\":[2],\"ranks\":[0,5],\"placements\":[\"R\"]}]"));
	t_spec_refused(ERR_LAYOUT_INVALID, "/target/layout/0/ranks/1",
		LAYOUT("{\"match\":\"*\",\"mesh\":[2],\"ranks\":[0,0],\"placements\":[\"R\"]}"));
	t_spec_refused(ERR_WORLD_MISMATCH, "/target/layout/0/ranks",
		LAYOUT("{\"match\":\"*\",\"mesh\":[2],\"ranks\":[0],\"placements\":[\"R\"]}"));
	t_spec_refused(ERR_LAYOUT_INVALID, "/target/layout/0/boxes/0",
		LAYOUT("{\"match\":\"*\",\"boxes\":[{\"rank\":0,\"offsets\":[0],\"sizes\":[1,2]}]}"));
	t_spec_refused(ERR_LAYOUT_INVALID, "/target/layout/0/dim_names/1",
		LAYOUT("{\"match\":\"*\",\"mesh\":[2,2],\"placements\":[\"R\",\"R\"],\"dim_names\":[\"dp\",\"dp\"]}"));
	t_spec_refused(ERR_LAYOUT_INVALID, "/target/layout/0/placements/0", LAYOUT("{\"match\":\"*\",\"placements\":[\"Partial(sum)\"]}"));
	t_spec_refused(ERR_LAYOUT_INVALID, "/target/layout/0/like", LAYOUT("{\"match\":\"*\",\"like\":\"shm:x\"}"));
	t_spec_refused(ERR_VALIDATION_FAILED, "/target/layout/0/chunks/dim",
		LAYOUT("{\"match\":\"*\",\"chunks\":{\"ranks\":[0]}}"));
	t_spec_refused(ERR_WORLD_MISMATCH, "/target/layout/0/mesh",
		LAYOUT("{\"match\":\"*\",\"mesh\":[65536,65536,65536,65536],\"placements\":[\"R\",\"R\",\"R\",\"R\"]}"));
}

static void test_problem(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(4096);
	enum err e = ERR(DIGEST_MISMATCH, "digest of \"x\" differs");
	json_t *doc;

	(void)state;
	e = err_expected(err_at_file(err_at_fqn(err_at_rank(e, 3), "m.w", 3), "__3_0.distcp", 4096), "aa", "bb");
	assert_int_equal(e, ERR_DIGEST_MISMATCH);
	problem_put(&b, err_last(), "/v1/jobs/1", "01J", "r-1");
	T_OK(buf_status(&b));
	T_OK(jval_parse((struct str){ (char *)b.p, b.len }, &doc));
	assert_string_equal(json_string_value(json_object_get(doc, "type")), "urn:dcpd:problem:digest_mismatch");
	assert_int_equal(json_integer_value(json_object_get(doc, "status")), 422);
	assert_int_equal(json_integer_value(json_object_get(doc, "rank")), 3);
	assert_int_equal(json_integer_value(json_object_get(doc, "offset")), 4096);
	assert_string_equal(json_string_value(json_object_get(doc, "job")), "01J");
	assert_string_equal(json_string_value(json_object_get(doc, "request_id")), "r-1");
	assert_null(json_object_get(doc, "pointer"));
	json_decref(doc);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_parse), cmocka_unit_test(test_numbers),          cmocka_unit_test(test_names),
		cmocka_unit_test(test_references),     cmocka_unit_test(test_kinds), cmocka_unit_test(test_placements),
		cmocka_unit_test(test_every_dtype),    cmocka_unit_test(test_every_field_of_every_kind), cmocka_unit_test(test_read_as_c),
		cmocka_unit_test(test_partial_in_memory),
		cmocka_unit_test(test_defaults),       cmocka_unit_test(test_refused_fields), cmocka_unit_test(test_older_names),
		cmocka_unit_test(test_refused_layouts), cmocka_unit_test(test_problem),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
