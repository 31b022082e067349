/* The small parts of the coordinator: loop, table, errors as documents, metrics, clock, who may do what. */
#include "base/map.h"
#include "base/vec.h"
#include "lib/t_server.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "server/service_clock.h"
#include "server/devices.h"
#include "server/errdoc.h"
#include "server/gauges.h"
#include "server/loop.h"
#include "server/metrics.h"
#include "server/unread.h"

struct item {
	char key[16];
};

static void test_table(void **state)
{
	static struct item items[1000];
	struct map table = { 0 };
	struct item *item;
	uint32_t seen = 0;

	(void)state;
	for (int i = 0; i < 1000; i++) {
		snprintf(items[i].key, sizeof items[i].key, "k%d", i);
		T_OK(map_add(&table, str_of(items[i].key), &items[i]));
	}
	for (int i = 0; i < 1000; i += 2)
		map_remove(&table, str_of(items[i].key));
	for (int i = 0; i < 1000; i++)
		assert_ptr_equal(map_object(&table, str_of(items[i].key)), i % 2 ? &items[i] : NULL);
	map_each(&table, item)
		seen++;
	assert_int_equal(seen, 500);
	map_free(&table);
	assert_null(map_object(&table, STR("k1")));
}

static char order[8];

static void note(void *user)
{
	size_t n = strlen(order);

	order[n] = *(const char *)user;
	order[n + 1] = '\0';
}

static void note_error(void *user, enum err e)
{
	assert_int_equal(e, ERR_NOT_FOUND);
	assert_string_equal(err_last()->text, "the thing");
	note(user);
}

static void *post_one(void *user)
{
	loop_post(user, note, (void *)"b");
	return NULL;
}

static void test_loop(void **state)
{
	struct event_base *base = event_base_new();
	struct loop *loop;
	struct loop_timer *timer, *stopped;
	pthread_t thread;
	void *failed;

	(void)state;
	order[0] = '\0';
	T_OK(loop_new(base, &loop));
	loop_later(loop, note_error, (void *)"a", ERR(NOT_FOUND, "the thing"));
	(void)ERR(INTERNAL, "something later"); /* the outcome handed over is the one of then */
	pthread_create(&thread, NULL, post_one, loop);
	pthread_join(thread, &failed);
	assert_null(failed);
	loop_timer_start(loop, 20, note, (void *)"c", &timer);
	loop_timer_start(loop, 5, note, (void *)"x", &stopped);
	loop_timer_stop(&stopped);
	assert_string_equal(order, "");
	event_base_loopexit(base, &(struct timeval){ .tv_usec = 60000 });
	event_base_dispatch(base);
	assert_string_equal(order, "abc");
	loop_free(loop);
	event_base_free(base);
}

static void test_errdoc(void **state)
{
	(void)state;
	enum err e = err_at_file(err_at_rank(ERR(DIGEST_MISMATCH, "wrong bytes"), 3), "__3_0.distcp", 512);
	e = err_expected(e, "aa", "bb");
	json_t *doc = errdoc_of(e);
	err_clear();
	assert_int_equal(errdoc_restore(doc), ERR_DIGEST_MISMATCH);
	assert_int_equal(err_last()->rank, 3);
	assert_int_equal(err_last()->offset, 512);
	assert_string_equal(err_last()->file, "__3_0.distcp");
	assert_string_equal(err_last()->actual, "bb");
	json_decref(doc);
	doc = json_pack("{s:i, s:[], s:s, s:s}", "code", 5, "detail", "rank", "two", "fqn", "w");
	assert_int_equal(errdoc_restore(doc), ERR_PROTOCOL); /* wrong types are left out */
	assert_string_equal(err_last()->fqn, "w");
	assert_int_equal(err_last()->rank, -1);
	json_decref(doc);
	assert_int_equal(errdoc_restore(NULL), ERR_PROTOCOL);
}

/* A worker's lists are data of others: they end up in records, which stay small, and in nothing else. */
static void test_errdoc_more(void **state)
{
	char fqn[4001];

	(void)state;
	memset(fqn, 'w', sizeof fqn - 1);
	fqn[sizeof fqn - 1] = '\0';
	json_t *problem = json_pack("{s:s, s:{s:[], s:[s, s], s:i, s:s}}", "code", "checkpoint_damaged", "more", "damage", "padding", "x",
				    "y", "damage_count", 1000, "code", "ok");
	json_t *more = json_object_get(problem, "more"), *damage = json_object_get(more, "damage");
	for (int i = 0; i < 1000; i++)
		json_array_append_new(damage, json_pack("{s:s, s:i}", "fqn", fqn, "offset", i));
	more = errdoc_more(problem);
	assert_true(json_dumpb(more, NULL, 0, JSON_COMPACT) <= ERRDOC_MORE_MAX);
	damage = json_object_get(more, "damage");
	assert_in_range(json_array_size(damage), 100, 999);
	assert_int_equal(json_integer_value(json_object_get(json_array_get(damage, 99), "offset")), 99); /* the first ones are kept */
	assert_int_equal(json_integer_value(json_object_get(more, "damage_count")), 1000);
	assert_int_equal(json_array_size(json_object_get(more, "padding")), 2);

	json_t *doc = errdoc_of(ERR(CHECKPOINT_DAMAGED, "1000 chunks"));
	errdoc_add(doc, more);
	assert_string_equal(json_string_value(json_object_get(doc, "code")), "checkpoint_damaged");
	assert_true(json_array_size(json_object_get(doc, "damage")) >= 100);
	json_t *brief = errdoc_brief(doc);
	assert_null(json_object_get(brief, "damage"));
	assert_int_equal(json_integer_value(json_object_get(brief, "damage_count")), 1000);
	json_decref(brief);
	json_decref(doc);
	json_decref(more);
	json_object_set_new(problem, "more", json_pack("{s:s+}", "note", fqn, fqn));
	more = errdoc_more(problem);
	assert_int_equal(json_object_size(more), 1);
	json_decref(more);
	char *big = malloc(ERRDOC_MORE_MAX + 1);
	memset(big, 'x', ERRDOC_MORE_MAX);
	big[ERRDOC_MORE_MAX] = '\0';
	json_object_set_new(problem, "more", json_pack("{s:s}", "note", big)); /* no list to cut */
	assert_null(errdoc_more(problem));
	json_object_set_new(problem, "more", json_array());
	assert_null(errdoc_more(problem));
	assert_null(errdoc_more(NULL));
	free(big);
	json_decref(problem);
}

static void test_clock_and_principal(void **state)
{
	char text[CLOCK_TEXT_MAX];
	int64_t ms;

	(void)state;
	assert_string_equal(clock_text(1795253768120, text), "2026-11-21T09:36:08.120Z");
	assert_true(clock_of_text(text, &ms) && ms == 1795253768120);
	assert_true(clock_of_text("1970-01-01T00:50:00Z", &ms) && ms == 3000000);
	assert_true(clock_of_text("1970-01-01T00:00:01.5Z", &ms) && ms == 1500);
	assert_true(clock_of_text("1970-01-01T00:00:01.123456Z", &ms) && ms == 1123);
	each(bad, ((const char *[]){ "", "now", "1970-01-01", "1970-01-01T00:00:00", "1970-13-01T00:00:00Z", "1970-01-01T00:00:00Z ",
				     "1970-01-01T24:00:00Z", "1970-01-01T00:00:00+01:00" }), 8)
		assert_false(clock_of_text(*bad, &ms));
	assert_true(principal_may(&(struct principal){ .uid = 5 }, 5));
	assert_false(principal_may(&(struct principal){ .uid = 5 }, 6));
	assert_true(principal_may(&(struct principal){ .uid = 5, .admin = true }, 6));
}

static void test_metrics(void **state)
{
	struct t_server t = { 0 };
	struct buf b = BUF_INIT(1 << 20);
	char labels[64];

	(void)state;
	t_server_start(&t, NULL);
	metrics_add(t.s->metrics, "dcpd_jobs_total", "kind=\"save\",outcome=\"failed\"", 2);
	metrics_observe(t.s->metrics, "dcpd_save_lag_seconds", "", 0.3);
	metrics_observe(t.s->metrics, "dcpd_save_lag_seconds", "", 9999);
	server_measure(t.s);
	metrics_set(t.s->metrics, "dcpd_last_durable_timestamp_seconds", "", 1795340856.051);
	for (int i = 0; i < METRICS_SERIES_MAX + 100; i++) { /* labels that a caller chooses fill no memory */
		snprintf(labels, sizeof labels, "route=\"r%d\"", i);
		metrics_add(t.s->metrics, "dcpd_http_requests_total", labels, 1);
	}
	metrics_render(t.s->metrics, false, &b);
	T_OK(buf_status(&b));
	buf_putc(&b, 0);
	assert_non_null(strstr((char *)b.p, "dcpd_jobs_total{kind=\"save\",outcome=\"failed\"} 2\n"));
	assert_non_null(strstr((char *)b.p, "dcpd_save_lag_seconds_bucket{le=\"0.25\"} 0\n"));
	assert_non_null(strstr((char *)b.p, "dcpd_save_lag_seconds_bucket{le=\"0.5\"} 1\n"));
	assert_non_null(strstr((char *)b.p, "dcpd_save_lag_seconds_bucket{le=\"+Inf\"} 2\n"));
	assert_non_null(strstr((char *)b.p, "dcpd_save_lag_seconds_count 2\n"));
	assert_non_null(strstr((char *)b.p, "dcpd_last_durable_timestamp_seconds 1795340856.051\n"));
	assert_non_null(strstr((char *)b.p, "dcpd_queue_oldest_seconds{kind=\"save\"} 0\n"));
	assert_null(strstr((char *)b.p, "r8200"));
	buf_free(&b);
	t_server_remove(&t);
}

static void check_devices(struct t_server *t, const char *part)
{
	struct buf b = BUF_INIT(1 << 16);

	T_OK(devices_put(t->s->devices, &b));
	buf_putc(&b, 0);
	if (!strstr((char *)b.p, part))
		T_FAIL("'%s' is not in %s", part, (char *)b.p);
	buf_free(&b);
}

/* The fake worker greets as one that knows nothing of GPUs. */
static void test_devices(void **state)
{
	struct t_server t = { 0 };

	(void)state;
	t_server_start(&t, NULL);
	assert_string_equal(devices_missing(t.s->devices, "nccl"), "not yet known: the probe has not answered");
	check_devices(&t, "\"nccl\":{\"available\":false,\"reason\":\"not yet known: the probe has not answered\"}},\"devices\":[]");
	T_UNTIL(&t, !strstr(devices_missing(t.s->devices, "nccl"), "not yet known"));
	check_devices(&t, "\"cuda\":{\"available\":false,\"reason\":\"the probe said nothing of GPUs\"}");
	json_t *hello = json_pack("{s:{s:{s:b}, s:{s:b, s:s}}, s:[{s:i}]}", "backends", "cuda", "available", 1, "nccl", "available", 0,
				  "reason", "none", "devices", "index", 0);
	assert_non_null(hello);
	devices_note(t.s->devices, hello);
	json_decref(hello);
	assert_null(devices_missing(t.s->devices, "cuda"));
	assert_string_equal(devices_missing(t.s->devices, "nccl"), "none");
	check_devices(&t, "\"backends\":{\"cuda\":{\"available\":true},\"nccl\":{\"available\":false,\"reason\":\"none\"}},"
			  "\"devices\":[{\"index\":0}]");
	devices_note(t.s->devices, NULL); /* what is known stays */
	check_devices(&t, "\"devices\":[{\"index\":0}]");
	t_server_stop(&t);
	t_server_remove(&t);
}

static void count_call(void *user, enum err e)
{
	assert_int_equal(e, OK);
	++*(int *)user;
}

static void test_unread(void **state)
{
	struct t_server t = { 0 };
	int calls = 0;

	(void)state;
	t_server_start(&t, NULL);
	unread_listen(t.s->unread, count_call, &calls);
	assert_true(unread_take(t.s->unread, UNREAD_MAX - 100000));
	assert_true(unread_take(t.s->unread, 100000));
	assert_false(unread_take(t.s->unread, UNREAD_SMALL + 1));
	assert_true(unread_take(t.s->unread, UNREAD_SMALL)); /* not counted, given or taken */
	unread_give(t.s->unread, UNREAD_SMALL);
	t_server_run(&t, 5);
	assert_int_equal(calls, 0);
	unread_shrink(t.s->unread, UNREAD_MAX - 100000, 100000);
	unread_give(t.s->unread, 100000);
	assert_int_equal(calls, 0); /* from the loop, once a turn */
	t_server_run(&t, 5);
	assert_int_equal(calls, 1);
	assert_int_equal(unread_bytes(t.s->unread), 100000);
	assert_false(unread_take(t.s->unread, (uint64_t)UNREAD_MAX * 3)); /* alone or not at all */
	unread_give(t.s->unread, 100000);
	assert_true(unread_take(t.s->unread, (uint64_t)UNREAD_MAX * 3));
	assert_false(unread_take(t.s->unread, UNREAD_SMALL + 1));
	unread_add(t.s->unread, UNREAD_MAX); /* room or not */
	unread_give(t.s->unread, UNREAD_MAX);
	unread_give(t.s->unread, (uint64_t)UNREAD_MAX * 3);
	assert_int_equal(unread_bytes(t.s->unread), 0);
	t_server_stop(&t);
	t_server_remove(&t);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_table),  cmocka_unit_test(test_loop),    cmocka_unit_test(test_errdoc),
		cmocka_unit_test(test_errdoc_more), cmocka_unit_test(test_metrics), cmocka_unit_test(test_clock_and_principal),
		cmocka_unit_test(test_devices),	       cmocka_unit_test(test_unread),
	};

	return cmocka_run_group_tests_name("server_parts", tests, NULL, NULL);
}
