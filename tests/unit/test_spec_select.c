/* The tensors and values that a spec selects, and their new names and dtypes. */
#include "lib/t_json.h"

#include <jansson.h>
#include <string.h>

#include "runner/spec.h"

static struct sdict *sd;
static struct spec_view view;

static void add_tensor(const char *fqn, const char *const *path)
{
	int64_t shape[] = { 4 }, dims[] = { 0, 4 };
	struct sd_path_part *parts;
	uint32_t index, n = 0;

	T_OK(sdict_add_tensor(sd, str_of(fqn), DT_FLOAT32, 1, shape, &index));
	T_OK(sdict_add_chunk(sd, index, dims, 2, (struct sd_loc){ 0, 0, 16 * index, 16 }));
	while (path && path[n])
		n++;
	if (n == 0)
		return;
	T_OK(arena_alloc(sd->arena, n, sizeof *parts, &parts));
	for (uint32_t i = 0; i < n; i++)
		parts[i].key = str_of(path[i]);
	sd->tensors[index].path = (struct sd_path){ parts, n };
}

static int setup(void **state)
{
	static const char *const w[] = { "module", "layer", "w", NULL };
	uint32_t index;

	(void)state;
	T_OK(sdict_new(UINT64_MAX, &sd));
	T_OK(sdict_add_file(sd, STR("__2_0.distcp"), 2, &index));
	sd->has_paths = true;
	add_tensor("module.layer.w", w);
	add_tensor("module.layer.b", NULL);
	add_tensor("optim.exp_avg.w", NULL);
	T_OK(sdict_add_value(sd, STR("optim.lr"), 1, (struct sd_loc){ 0, 0, 100, 5 }, &index));
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	spec_view_free(&view);
	sdict_free(sd);
	return 0;
}

/* As a reshard with these members would choose. */
static enum err chosen_by(json_t *members)
{
	CLEANUP(jval_drop) json_t *doc = json_pack("{s:s, s:{s:s, s:s}, s:{s:s, s:s}}", "kind", "reshard", "source", "storage", "main",
						   "name", "a", "target", "storage", "main", "name", "b");
	CLEANUP(spec_free) struct spec spec = { 0 };

	json_object_update_new(doc, members);
	spec_view_free(&view);
	enum err e = spec_read(doc, &spec);
	return e ? e : spec_select(&spec, sd, &view);
}

static enum err chosen(const char *text)
{
	return chosen_by(t_json(text));
}

static void test_all(void **state)
{
	(void)state;
	T_OK(chosen("{}"));
	assert_int_equal(view.sd->tensor_count, 3);
	assert_int_equal(view.sd->value_count, 1);
	assert_int_equal(view.skipped, 0);
	assert_int_equal(view.dtypes[2], DT_FLOAT32);
	assert_int_equal(view.sd->chunks[2].loc.offset, 32);
	assert_int_equal(view.sd->chunks[2].rank, 2);
	assert_int_equal(view.sd->tensors[0].path.count, 3);
	assert_int_equal(view.sd->values[0].loc.length, 5);
	assert_true(str_is(view.sd->files[0].name, "__2_0.distcp"));
}

static void test_include_exclude(void **state)
{
	(void)state;
	T_OK(chosen("{'include':['module.*'],'exclude':['*.b']}"));
	assert_int_equal(view.sd->tensor_count, 1);
	assert_int_equal(view.sd->value_count, 0);
	assert_int_equal(view.skipped, 3);
	T_OK(chosen("{'exclude':['optim.*']}"));
	assert_int_equal(view.sd->tensor_count, 2);
	T_OK(chosen("{'include':['nothing']}"));
	assert_int_equal(view.sd->tensor_count, 0);
}

/* include and exclude see the source's names, dtype the new ones. */
static void test_rename(void **state)
{
	(void)state;
	T_OK(chosen("{'rename':[['^module\\\\.',''],['(\\\\w)$','${1}x']],'include':['module.*'],'dtype':[['layer.*','bfloat16']]}"));
	assert_non_null(sdict_tensor(view.sd, STR("layer.wx")));
	assert_non_null(sdict_tensor(view.sd, STR("layer.bx")));
	assert_int_equal(view.dtypes[0], DT_BFLOAT16);
}

static void test_rename_keeps_the_path_it_can(void **state)
{
	(void)state;
	T_OK(chosen("{'rename':[['^module\\\\.','']]}"));
	const struct sd_path *p = &view.sd->tensors[0].path;
	assert_int_equal(p->count, 2);
	assert_true(str_is(p->parts[0].key, "layer") && str_is(p->parts[1].key, "w"));
	T_OK(chosen("{'rename':[['layer','block.0']]}"));
	p = &view.sd->tensors[0].path;
	assert_int_equal(p->count, 2);
	assert_true(str_is(p->parts[0].key, "module.block.0") && str_is(p->parts[1].key, "w"));
}

static void test_two_of_one_name(void **state)
{
	(void)state;
	T_ERR(DUPLICATE_KEY, chosen("{'rename':[['\\\\.[wb]$','']]}"));
	assert_string_equal(err_last()->fqn, "module.layer");
	T_ERR(DUPLICATE_KEY, chosen("{'rename':[['optim.lr','module.layer.w']]}")); /* a value meets a tensor */
}

static void test_bad_patterns(void **state)
{
	static const char *const bad[] = { "{'rename':[['(','x']]}", "{'rename':[['a']]}", "{'rename':[[1,2]]}", "{'rename':['x']}",
					   "{'rename':[['\\\\C','x']]}", "{'rename':[['l','$9']]}", "{'rename':[['l','${x']]}" };

	(void)state;
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		T_ERR(VALIDATION_FAILED, chosen(bad[i]));
	T_ERR(VALIDATION_FAILED, chosen("{'dtype':[['*','float99']]}"));
	T_ERR(VALIDATION_FAILED, chosen("{'dtype':[['*',1]]}"));
}

/* Patterns that try every way there is end at a limit, instead of never, and say for which name. */
static void test_catastrophic(void **state)
{
	char name[200];

	(void)state;
	memset(name, 'a', sizeof name);
	name[sizeof name - 1] = '\0';
	add_tensor(name, NULL);
	T_ERR(VALIDATION_FAILED, chosen("{'include':['aaa*'],'rename':[['^(a|aa|aaa)+[b-z]','']]}"));
	assert_string_equal(err_last()->fqn, name);
}

/* Each round doubles the name: it stops at a bound. */
static void test_growing_names(void **state)
{
	char text[1024] = "{'rename':[";

	(void)state;
	for (int i = 0; i < 30; i++)
		snprintf(text + strlen(text), sizeof text - strlen(text), "%s['^.*','$0$0']", i ? "," : "");
	snprintf(text + strlen(text), sizeof text - strlen(text), "]}");
	T_ERR(VALIDATION_FAILED, chosen(text));
}

static void test_too_many(void **state)
{
	json_t *list = json_array();

	(void)state;
	for (int i = 0; i < 65; i++)
		json_array_append_new(list, json_pack("[s, s]", "a", "a"));
	T_ERR(VALIDATION_FAILED, chosen_by(json_pack("{s:o}", "rename", list)));
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(test_all), T(test_include_exclude), T(test_rename), T(test_rename_keeps_the_path_it_can), T(test_two_of_one_name),
		T(test_bad_patterns), T(test_catastrophic), T(test_growing_names), T(test_too_many),
	};

	return cmocka_run_group_tests_name("spec_select", tests, NULL, NULL);
}
