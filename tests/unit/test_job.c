/* Jobs from creation to their end, over a gang of fake workers. */
#include "lib/t_server.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/events.h"
#include "server/storage.h"

static struct t_server t;

static int setup(void **state)
{
	static const char *const options[] = { "--stall-after", "300ms", "--stall-deadline", "2s", "--lookup-deadline", "1s", NULL };

	(void)state;
	memset(&t, 0, sizeof t);
	t_server_start(&t, options);
	t_state_dict(&t, "train", 2);
	t_seal_all(&t, "train", 2, 7);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	t_server_remove(&t);
	return 0;
}

#define SAVE(name, more) "{'kind':'save','source':{'state_dict':'train'},'target':{'storage':'main','name':'" name "'}" more "}"
#define FAKE(script) ",'labels':{'fake':'" script "'}"

static const char *error_code(json_t *doc)
{
	return json_string_value(json_object_get(json_object_get(doc, "error"), "code"));
}

static void test_save(void **state)
{
	char id[27], path[256];
	struct stat st;

	(void)state;
	t_job(&t, SAVE("run1/step-1", ""), id);
	assert_int_equal(strlen(id), 26);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	snprintf(path, sizeof path, "%s/main/run1/step-1/.dcpd.json", t.dir);
	assert_int_equal(stat(path, &st), 0);
	json_t *doc = t_job_doc(&t, id);
	assert_string_equal(json_string_value(json_object_get(doc, "state")), "succeeded");
	assert_true(json_is_string(json_object_get(json_object_get(doc, "milestones"), "durable")));
	assert_int_equal(json_integer_value(json_object_get(json_object_get(json_object_get(doc, "spec"), "source"), "generation")), 7);
	assert_int_equal(json_integer_value(json_object_get(json_object_get(doc, "result"), "bytes")), 1000);
	json_decref(doc);
	assert_int_equal(jobs_live(t.s), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_save, setup, teardown),
	};

	(void)error_code;
	return cmocka_run_group_tests_name("job", tests, NULL, NULL);
}
