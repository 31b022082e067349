/* t_trained.h: for tests of jobs: each test has a coordinator `t` of its own with the state dict "train" of two ranks, sealed. */
#pragma once
#include "lib/t_server.h"

static struct t_server t;

static inline int setup(void **state)
{
	(void)state;
	return t_server_train(&t, NULL);
}

static inline int teardown(void **state)
{
	(void)state;
	t_server_remove(&t);
	return 0;
}

#define SAVE(name, more) "{'kind':'save','source':{'state_dict':'train'},'target':{'storage':'main','name':'" name "'}" more "}"

static inline void cancel(const char *id)
{
	struct t_answer c = { 0 };

	job_cancel(t.s, &t.me, str_of(id), t_done, &c);
	t_server_until(&t, &c.called);
	T_OK(c.e);
	assert_int_equal(t_job_end(&t, id), JOB_CANCELLED);
}
