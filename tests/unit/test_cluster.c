/* Answers of etcd's gateway as a node reads them: numbers are strings, false and 0 are left out, and any of them may lie. */
#include "lib/t.h"

#include <jansson.h>

#include "base/jtext.h"
#include "server/cluster.h"
#include "server/cluster_impl.h"
#include "server/config.h"
#include "server/etcd.h"
#include "server/parts.h"

static json_t *row(const char *key, const char *value)
{
	CLEANUP(buf_free) struct buf k = BUF_INIT(4096), v = BUF_INIT(4096);

	buf_base64(&k, key, strlen(key));
	buf_base64(&v, value, strlen(value));
	json_t *made = json_pack("{s:s%, s:s%, s:s}", "key", k.p, k.len, "value", v.p, v.len, "mod_revision", "7");
	assert_non_null(made);
	return made;
}

static json_t *answer_of(json_t *members, json_t *alive, json_t *drained)
{
	json_t *made = json_pack("{s:[{s:{s:o}}, {s:{s:o}}, {s:{s:o}}]}", "responses", "response_range", "kvs", members,
				 "response_range", "kvs", alive, "response_range", "kvs", drained);

	assert_non_null(made);
	return made;
}

static struct config config = { .cluster_prefix = (char *)"/t", .advertise = (char *)"127.0.0.1:8427" };
static struct server server = { .config = &config };

static void states_follow_from_what_etcd_holds(void **)
{
	struct cluster c = { .server = &server, .name = "b" };
	CLEANUP(buf_free) struct buf shown = BUF_INIT(4096);
	CLEANUP(json_decrefp) json_t *doc = answer_of(
		json_pack("[o, o, o, o, o]", row("/t/members/a", "{\"advertise\":\"h:1\"}"), row("/t/members/b", "{}"),
			  row("/t/members/c", "{}"), row("/t/members/d", "{}"), row("/t/members/e", "{}")),
		json_pack("[o, o, o, o, o]", row("/t/alive/a", "{\"jobs\":2}"), row("/t/alive/b", "{\"jobs\":0,\"draining\":true}"),
			  row("/t/alive/c", "{\"jobs\":1,\"draining\":true}"), row("/t/alive/d", "{\"jobs\":0}"),
			  row("/t/alive/stranger", "{}")),
		json_pack("[o, o]", row("/t/drained/b", "{}"), row("/t/drained/d", "{}")));
	static const enum cluster_state wanted[] = { CLUSTER_JOINED, CLUSTER_DRAINED, CLUSTER_DRAINING, CLUSTER_DRAINING, CLUSTER_AWAY };

	assert_int_equal(cluster_take(&c, doc, 0), OK);
	assert_int_equal(c.nodes.n, 5);
	for (size_t i = 0; i < 5; i++)
		assert_int_equal(c.nodes.v[i].state, wanted[i]);
	assert_true(c.drained);
	assert_true(cluster_is_drained(&c) && !cluster_is_drained(NULL));
	assert_int_equal(cluster_put_node(&c, STR("a"), &shown), OK);
	assert_non_null(memmem(shown.p, shown.len, "\"advertise\":\"h:1\"", 17));
	assert_int_equal(cluster_put_node(&c, STR("f"), &shown), ERR_NOT_FOUND);
	cluster_nodes_free(&c);
}

static void values_that_are_none_of_dcpds_are_named_and_passed_over(void **)
{
	static const struct {
		const char *key, *value;
		bool is_node; /* its name is known */
	} bad[] = {
		{ "/t/members/a", "no JSON", true },
		{ "/t/members/a", "[]", true },
		{ "/t/members/", "{}", false },
		{ "/other/members/a", "{}", false },
		{ "/t/members/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "{}", false },
	};

	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		struct cluster c = { .server = &server, .name = "b" };
		CLEANUP(json_decrefp) json_t *doc = answer_of(
			json_pack("[o, o]", row(bad[i].key, bad[i].value), row("/t/members/b", "{\"id\":\"1\"}")),
			json_pack("[o, o]", row("/t/alive/a", "no JSON"), row("/t/alive/b", "{\"jobs\":3}")),
			json_pack("[o]", row("/t/drained/", "{}")));
		assert_int_equal(cluster_take(&c, doc, 0), OK);
		assert_int_equal(c.nodes.n, 1 + bad[i].is_node);
		assert_int_equal(c.nodes.v[bad[i].is_node].jobs, 3);
		assert_int_equal(c.nodes.v[0].state, CLUSTER_JOINED); /* its lease is not over */
		assert_non_null(strstr(cluster_oddity(&c, 0), bad[i].key));
		assert_non_null(strstr(cluster_oddity(&c, 0), " and 2 more"));
		assert_null(cluster_oddity(&c, 1));
		snprintf(c.apart, sizeof c.apart, "a node is not reached");
		assert_string_equal(cluster_oddity(&c, 0), "a node is not reached");
		assert_non_null(strstr(cluster_oddity(&c, 1), bad[i].key)); /* hidden by none */
		assert_true(cluster_is_described(&c));
		cluster_nodes_free(&c);
	}
}

static void an_answer_of_something_else_is_no_crash(void **)
{
	static const char *const texts[] = { "{}", "{\"responses\":3}", "{\"responses\":[{\"response_range\":{\"kvs\":[1,null,{}]}}]}",
					     "{\"responses\":[{\"response_range\":{\"kvs\":[{\"key\":\"%%\",\"value\":\"e30=\"}]}}]}" };

	for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
		struct cluster c = { .server = &server, .name = "b" };
		CLEANUP(json_decrefp) json_t *doc = NULL;
		assert_int_equal(jtext_parse(str_of(texts[i]), 0, &doc), OK);
		assert_int_equal(cluster_take(&c, doc, 0) != OK, i >= 2);
		cluster_nodes_free(&c);
	}
}

static void numbers_are_strings_and_may_be_missing(void **)
{
	CLEANUP(json_decrefp) json_t *doc = json_pack("{s:s, s:i, s:s, s:s}", "a", "7587862113412345678", "b", 5, "c", "-1", "d", "x");

	assert_int_equal(etcd_number(doc, "a"), INT64_C(7587862113412345678));
	assert_int_equal(etcd_number(doc, "b"), 5);
	assert_int_equal(etcd_number(doc, "c"), 0);
	assert_int_equal(etcd_number(doc, "d"), 0);
	assert_int_equal(etcd_number(doc, "e"), 0);
	assert_false(etcd_succeeded(doc));
}

static void a_part_without_memory_makes_no_transaction(void **)
{
	CLEANUP(json_decrefp) json_t *none = etcd_txn(json_array(), json_pack("[o]", etcd_put("k", NULL, 0)), json_array());

	assert_null(none);
}

/* A node may tell of older copies first, and of more than are asked for. */
static void of_many_copies_the_newest_are_known(void **)
{
	CLEANUP(json_decrefp) json_t *list = json_array();
	char job[JOB_ID_LEN + 1];

	for (unsigned i = 10; i < 100; i++) {
		snprintf(job, sizeof job, "01J0000000000000000000%02u00", i);
		CLEANUP(json_decrefp) json_t *one =
			json_pack("{s:s, s:i, s:i, s:{s:s}}", "name", "x", "generation", 1, "uid", 0, "replica", "job", job);
		cluster_add_replica(list, "a", one);
	}
	assert_true(json_array_size(list) >= 4 && json_array_size(list) < 90);
	for (size_t i = 0; i < json_array_size(list); i++) {
		snprintf(job, sizeof job, "01J0000000000000000000%02u00", (unsigned)(99 - i));
		assert_string_equal(json_string_value(json_object_get(json_array_get(list, i), "job")), job);
	}
}

/* A worker would send it to that address. */
static void a_node_without_tls_gets_no_key_of_images(void **)
{
	struct cluster c = { .server = &server, .name = "b", .secret = "0123456789abcdef" };
	static const char member[] = "{\"url\":\"http://192.0.2.1:8427\",\"protocol\":1}";
	CLEANUP(json_decrefp) json_t *doc = answer_of(json_pack("[o]", row("/t/members/a", member)),
						      json_pack("[o]", row("/t/alive/a", "{\"jobs\":0}")), json_array());
	const char *storage = NULL;

	assert_int_equal(cluster_take(&c, doc, 0), OK);
	server.cluster = &c;
	assert_int_equal(cluster_storage(&server, "a", &storage), ERR_CLUSTER_UNAVAILABLE);
	assert_non_null(strstr(err_last()->text, "node \"a\" has no TLS beyond loopback"));
	assert_null(storage);
	server.cluster = NULL;
	cluster_nodes_free(&c);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(states_follow_from_what_etcd_holds),
		cmocka_unit_test(values_that_are_none_of_dcpds_are_named_and_passed_over),
		cmocka_unit_test(an_answer_of_something_else_is_no_crash),
		cmocka_unit_test(numbers_are_strings_and_may_be_missing),
		cmocka_unit_test(of_many_copies_the_newest_are_known),
		cmocka_unit_test(a_node_without_tls_gets_no_key_of_images),
		cmocka_unit_test(a_part_without_memory_makes_no_transaction),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
