/* Requests for operations on state dicts: defaults, and the place named when one is refused. */
#include "lib/t_spec.h"

#include <string.h>

#define ENDS "\"source\":{\"state_dict\":\"s\"},\"target\":{\"state_dict\":\"t\"}"
#define OP(kind, more) "{\"kind\":\"" kind "\"," ENDS more "}"
#define COMPARE(more) "{\"kind\":\"compare\",\"a\":{\"state_dict\":\"s\"},\"b\":{\"state_dict\":\"t\"}" more "}"

/* Numbers are equal in any spelling: 0 and 0.0 are. */
static bool same(const json_t *a, const json_t *b)
{
	return json_is_number(a) && json_is_number(b) ? json_number_value(a) == json_number_value(b) : json_equal(a, b);
}

static void test_defaults(void **state)
{
	static const struct {
		const char *text, *expected;
	} cases[] = {
		{ OP("create", ""), "{\"share_memory\":true,\"pin_memory\":false}" },
		{ OP("copy", ""), "{\"group\":[],\"device\":\"cpu\",\"backend\":\"auto\",\"type_check\":true,"
				"\"options\":{\"retries\":1}}" },
		{ OP("offload", ""), "{\"ranks_only\":[]}" },
		{ OP("gather", ",\"cpu_offload\":true,\"ranks_only\":[2,0]"), "{\"cpu_offload\":true,\"ranks_only\":[2,0]}" },
		{ OP("broadcast", ",\"group\":[5,3],\"root\":1"), "{\"root\":1,\"strict\":false,\"cpu_offload\":false,\"group\":[5,3]}" },
		{ OP("distribute", ""), "{\"layout\":[]}" },
		{ OP("redistribute", ",\"layout\":[{\"match\":\"*\",\"mesh\":[2,2],\"placements\":[\"S(0)\",\"Partial(sum)\"]}]"),
		  "{\"target\":{\"state_dict\":\"t\",\"world_size\":4}}" },
		{ COMPARE(""), "{\"values\":false,\"rtol\":0.0,\"atol\":0.0}" },
		{ COMPARE(",\"values\":true,\"rtol\":1"), "{\"values\":true,\"rtol\":1}" },
	};

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		json_t *doc = t_spec_parse(cases[i].text), *expected = t_spec_parse(cases[i].expected), *value;
		const char *key;
		CLEANUP(spec_free) struct spec s = { 0 };
		T_OK(spec_read(doc, &s));
		json_object_foreach(expected, key, value)
			if (!same(json_object_get(doc, key), value))
				T_FAIL("%s: %s is not %s", cases[i].text, key, cases[i].expected);
		json_decref(doc);
		json_decref(expected);
	}
}

static void test_refused(void **state)
{
	(void)state;
	t_spec_refused(ERR_VALIDATION_FAILED, "/target", "{\"kind\":\"gather\",\"source\":{\"state_dict\":\"s\"}}");
	t_spec_refused(ERR_UNKNOWN_FIELD, "/source/storage", "{\"kind\":\"gather\",\"source\":{\"storage\":\"main\",\"name\":\"x\"},"
						       "\"target\":{\"state_dict\":\"t\"}}");
	t_spec_refused(ERR_UNKNOWN_FIELD, "/target/layout",
		"{\"kind\":\"distribute\",\"source\":{\"state_dict\":\"s\"},\"target\":{\"state_dict\":\"t\",\"layout\":[]}}");
	t_spec_refused(ERR_UNKNOWN_FIELD, "/target/world_size",
		"{\"kind\":\"copy\",\"source\":{\"state_dict\":\"s\"},\"target\":{\"state_dict\":\"t\",\"world_size\":2}}");
	t_spec_refused(ERR_VALIDATION_FAILED, "/target",
		"{\"kind\":\"copy\",\"source\":{\"state_dict\":\"s\"},\"target\":{\"state_dict\":\"s\"}}");
	t_spec_refused(ERR_UNKNOWN_FIELD, "/root", OP("gather", ",\"root\":0"));
	t_spec_refused(ERR_UNKNOWN_FIELD, "/ranks_only", OP("broadcast", ",\"ranks_only\":[0]"));
	t_spec_refused(ERR_UNKNOWN_FIELD, "/strict", OP("distribute", ",\"strict\":true"));
	t_spec_refused(ERR_UNKNOWN_FIELD, "/layout", OP("copy", ",\"layout\":[]"));
	t_spec_refused(ERR_UNKNOWN_FIELD, "/include", OP("copy", ",\"include\":[\"a\"]"));
	t_spec_refused(ERR_UNKNOWN_FIELD, "/cpu_offload", OP("create", ",\"cpu_offload\":true"));
	t_spec_refused(ERR_UNKNOWN_FIELD, "/options/overwrite", OP("copy", ",\"options\":{\"overwrite\":true}"));
	t_spec_refused(ERR_UNKNOWN_FIELD, "/target", COMPARE(",\"target\":{\"state_dict\":\"t\"}"));
	t_spec_refused(ERR_VALIDATION_FAILED, "/group/1", OP("gather", ",\"group\":[1,1]"));
	t_spec_refused(ERR_VALIDATION_FAILED, "/group/0", OP("gather", ",\"group\":[-1]"));
	t_spec_refused(ERR_VALIDATION_FAILED, "/group/0", OP("gather", ",\"group\":[65536]"));
	t_spec_refused(ERR_VALIDATION_FAILED, "/group/0", OP("gather", ",\"group\":[true]"));
	t_spec_refused(ERR_VALIDATION_FAILED, "/group", OP("gather", ",\"group\":2"));
	t_spec_refused(ERR_VALIDATION_FAILED, "/ranks_only/0", OP("offload", ",\"group\":[4,5],\"ranks_only\":[4]"));
	t_spec_refused(ERR_VALIDATION_FAILED, "/root", OP("broadcast", ",\"group\":[4,5],\"root\":2"));
	t_spec_refused(ERR_VALIDATION_FAILED, "/backend", OP("copy", ",\"backend\":\"mpi\""));
	t_spec_refused(ERR_VALIDATION_FAILED, "/device", OP("copy", ",\"device\":\"tpu\""));
	t_spec_refused(ERR_VALIDATION_FAILED, "/type_check", OP("copy", ",\"type_check\":1"));
	t_spec_refused(ERR_VALIDATION_FAILED, "/rtol", COMPARE(",\"rtol\":0.5"));
	t_spec_refused(ERR_VALIDATION_FAILED, "/atol", COMPARE(",\"values\":true,\"atol\":-1"));
	t_spec_refused(ERR_WORLD_MISMATCH, "/layout/0/mesh", "{\"kind\":\"redistribute\",\"source\":{\"state_dict\":\"s\"},"
		"\"target\":{\"state_dict\":\"t\",\"world_size\":3},\"layout\":[{\"match\":\"*\",\"mesh\":[2],\"placements\":[\"R\"]}]}");
	t_spec_refused(ERR_LAYOUT_INVALID, "/layout/0/placements/0",
		OP("distribute", ",\"layout\":[{\"match\":\"*\",\"mesh\":[2],\"placements\":[\"X\"]}]"));
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_defaults), cmocka_unit_test(test_refused) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
