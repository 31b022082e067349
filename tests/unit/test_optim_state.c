/* Optimizer state of a part of a group: the forms in which groups are listed, and names that are none of them. */
#include "lib/t.h"

#include <string.h>

#include "base/jtext.h"
#include "plan/optim_state.h"

static struct sdict *sd;

static int setup(void **state)
{
	(void)state;
	jtext_init();
	T_OK(sdict_new(1 << 20, &sd));
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	sdict_free(sd);
	sd = NULL;
	return 0;
}

static void add(const char *fqn)
{
	int64_t shape[1] = { 4 };
	uint32_t index;

	T_OK(sdict_add_tensor(sd, str_of(fqn), DT_FLOAT32, 1, shape, &index));
}

/* The key path that PyTorch's planner notes for what is below `dict`: one part for the parameter, whatever dots it has. */
static void add_at(const char *fqn, const char *param, const char *name)
{
	struct sd_path_part parts[] = { { .key = STR("o") }, { .key = STR("state") }, { .key = str_of(param) }, { .key = str_of(name) } };
	struct sd_tensor *t;

	add(fqn);
	t = sdict_tensor(sd, str_of(fqn));
	T_OK(sdict_copy_path(sd, (struct sd_path){ parts, 4 }, &t->path));
}

static enum err listed(const char *fqn, const char *value)
{
	struct optim_state s;
	json_t *doc;

	T_OK(jtext_parse(str_of(value), 0, &doc));
	T_OK(optim_state_open(sd, &s));
	enum err e = optim_state_check_listed(&s, str_of(fqn), doc);
	optim_state_close(&s);
	json_decref(doc);
	return e;
}

static enum err keys(void)
{
	struct optim_state s;

	T_OK(optim_state_open(sd, &s));
	enum err e = optim_state_check_keys(&s);
	optim_state_close(&s);
	return e;
}

static void test_what_lists(void **state)
{
	static const struct { const char *fqn; enum optim_listing listing; } names[] = {
		{ "optim.param_groups", OPTIM_LISTS_GROUPS },		 { "param_groups", OPTIM_LISTS_GROUPS },
		{ "optim.param_groups.0.params", OPTIM_LISTS_PARAMS },	 { "a.b.param_groups.12.params", OPTIM_LISTS_PARAMS },
		{ "optim.param_groups.0.lr", OPTIM_LISTS_NOTHING },	 { "optim.param_groups.", OPTIM_LISTS_NOTHING },
		{ "optim.param_groups.x.params", OPTIM_LISTS_NOTHING }, { "optim.param_groupsy", OPTIM_LISTS_NOTHING },
		{ "my_param_groups", OPTIM_LISTS_NOTHING },		 { "", OPTIM_LISTS_NOTHING },
	};

	(void)state;
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		assert_int_equal(optim_state_listing(str_of(names[i].fqn)), names[i].listing);
}

static void test_lists(void **state)
{
	(void)state;
	add("model.a.w");
	T_OK(listed("o.param_groups.0.params", "[\"a.w\",\"b\"]")); /* no state at all */
	add("o.state.a.w.exp_avg");
	assert_int_equal(listed("o.param_groups.0.params", "[\"a.w\",\"b\"]"), ERR_CHECKPOINT_INCOMPLETE);
	assert_string_equal(err_last()->fqn, "b");
	assert_non_null(strstr(err_last()->text, "1 of the 2"));
	assert_int_equal(listed("o.param_groups", "[{\"params\":[\"b\",\"a.w\"]}]"), ERR_CHECKPOINT_INCOMPLETE);
	T_OK(listed("o.param_groups", "[{\"params\":[\"a.w\"]},{\"params\":[\"b\"],\"lr\":1}]"));
	T_OK(listed("p.param_groups", "[{\"params\":[\"a.w\",\"b\"]}]")); /* another optimizer */
	T_OK(listed("o.param_groups", "[1,{\"params\":1},{},[\"a.w\"],{\"params\":[1.5,null,[]]}]"));
	T_OK(listed("o.param_groups.0.params", "{\"a.w\":1}"));
}

static void test_numbers_and_paths(void **state)
{
	(void)state;
	add_at("o.state.0.preconditioners.1", "0", "preconditioners.1");
	assert_int_equal(listed("o.param_groups.0.params", "[0,1]"), ERR_CHECKPOINT_INCOMPLETE);
	assert_string_equal(err_last()->fqn, "1");
	add_at("o.state.1.step", "1", "step");
	T_OK(listed("o.param_groups.0.params", "[0,1]"));
	add("o.state.x"); /* of no parameter */
	add("state.");
	add("state.w.step");
	assert_int_equal(listed("param_groups", "[{\"params\":[\"w\",\"v\"]}]"), ERR_CHECKPOINT_INCOMPLETE);
}

static void test_keys(void **state)
{
	(void)state;
	add("o.param_groups.a.w.lr");
	add("o.param_groups.a.w.betas");
	add("o.param_groups.b.lr");
	add("o.param_groups.0.lr"); /* of a list of groups */
	add("o.param_groups.lr");
	T_OK(keys());
	add("o.state.a.w.exp_avg");
	assert_int_equal(keys(), ERR_CHECKPOINT_INCOMPLETE);
	assert_string_equal(err_last()->fqn, "b");
	add("o.state.b.exp_avg");
	T_OK(keys());
	for (char c = 'A'; c < 'A' + 20; c++) { /* more optimizers than are looked at */
		char fqn[] = "x.param_groups.q.lr";
		fqn[0] = c;
		add(fqn);
	}
	T_OK(keys());
}

int main(void)
{
#define T(test) cmocka_unit_test_setup_teardown(test, setup, teardown)
	const struct CMUnitTest tests[] = { T(test_what_lists), T(test_lists), T(test_numbers_and_paths), T(test_keys) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
