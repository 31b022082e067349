/* loop.c: see loop.h.
 *
 * Other threads append to a list under a mutex and write to an eventfd; the loop takes the whole list at once. An eventfd rather
 * than libevent's own locking: no libevent call is made outside the loop's thread, so that nothing in it needs locks. */
#include "server/loop.h"

#include <event2/event.h>
#include <event2/event_struct.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/list.h"
#include "base/mem.h"
#include "os/watch.h"

enum { BEAT_MS = 500 };

struct posted {
	struct posted *next;
	loop_fn fn;
	void (*later)(void *user, enum err e);
	void *user;
	enum err e;
	struct err_info *info;
};

struct loop {
	struct event_base *base;
	struct watch *wake;
	pthread_mutex_t lock;
	struct posted *first, **last;
	struct loop_timer *late, *beat;    /* late: timers that libevent had no memory for; beat tries again */
};

struct loop_timer {
	struct event ev;
	struct loop *loop;
	struct loop_timer *next;           /* in loop->late */
	int64_t ms;
	loop_fn fn;
	void *user;
	bool once;
};

static void arm_late(void *user);

static void run_one(struct posted *p)
{
	if (p->later) {
		if (p->info)
			err_restore(p->info);
		p->later(p->user, p->e);
	} else {
		p->fn(p->user);
	}
	mem_free(p->info);
	mem_free(p);
}

static struct posted *take_all(struct loop *l)
{
	pthread_mutex_lock(&l->lock);
	struct posted *p = l->first;
	l->first = NULL;
	l->last = &l->first;
	pthread_mutex_unlock(&l->lock);
	return p;
}

/* One batch a turn: what the callbacks post runs in the next one, so that sockets get their share. */
static void on_wake(void *user)
{
	struct loop *l = user;
	uint64_t count;

	(void)!read(watch_fd(l->wake), &count, sizeof count);
	struct posted *all = take_all(l);
	list_each(p, all)
		run_one(p);
}

FALLIBLE enum err loop_new(struct event_base *base, struct loop **out)
{
	struct loop *l = mem_zalloc(1, sizeof *l);

	NEED(l, "cannot make the loop");
	pthread_mutex_init(&l->lock, NULL);
	l->base = base;
	l->last = &l->first;
	int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	enum err e = fd < 0 ? ERR_SYS(SYSTEM, "cannot make an eventfd") : watch_new(base, &fd, on_wake, NULL, l, &l->wake);
	e = e ?: watch_reads(l->wake, true);
	e = e ?: loop_every(l, BEAT_MS, arm_late, l, &l->beat);
	if (e) {
		if (fd >= 0)
			close(fd);
		loop_free(l);
		return e;
	}
	*out = l;
	return OK;
}

void loop_free(struct loop *l)
{
	if (!l)
		return;
	struct posted *all = take_all(l);
	list_each(p, all) {
		mem_free(p->info);
		mem_free(p);
	}
	watch_free(&l->wake);
	loop_timer_stop(&l->beat);
	pthread_mutex_destroy(&l->lock);
	mem_free(l);
}

static void append(struct loop *l, struct posted *p)
{
	static const uint64_t one = 1;

	pthread_mutex_lock(&l->lock);
	bool was_empty = !l->first;
	*l->last = p;
	l->last = &p->next;
	pthread_mutex_unlock(&l->lock);
	if (was_empty)
		must(write(watch_fd(l->wake), &one, sizeof one) == (ssize_t)sizeof one || errno == EAGAIN);
}

void loop_post(struct loop *l, loop_fn fn, void *user)
{
	struct posted *p = mem_sure(sizeof *p);

	p->fn = fn;
	p->user = user;
	append(l, p);
}

void loop_later(struct loop *l, void (*fn)(void *user, enum err e), void *user, enum err e)
{
	struct posted *p = mem_sure(sizeof *p);

	p->later = fn;
	p->user = user;
	p->e = e;
	if (e) {
		p->info = mem_sure(sizeof *p->info);
		*p->info = *err_last();
	}
	append(l, p);
}

void loop_run_posted(struct loop *l)
{
	for (struct posted *p; (p = take_all(l));)
		for (struct posted *next; p; p = next) {
			next = p->next;
			run_one(p);
		}
}

static void on_timer(evutil_socket_t, short, void *user)
{
	struct loop_timer *t = user;
	loop_fn fn = t->fn;
	void *of = t->user;

	if (t->once)
		mem_free(t); /* libevent has taken the event out of the loop before it calls */
	fn(of);
}

static bool arm(struct loop_timer *t)
{
	struct timeval tv = { .tv_sec = t->ms / 1000, .tv_usec = t->ms % 1000 * 1000 };

	return evtimer_add(&t->ev, &tv) == 0;
}

static void arm_late(void *user)
{
	struct loop *l = user;

	list_each(t, l->late)
		if (arm(t))
			list_remove(&l->late, t);
}

static struct loop_timer *timer_new(struct loop *l, int64_t ms, loop_fn fn, void *user, bool once)
{
	struct loop_timer *t = mem_sure(sizeof *t);

	*t = (struct loop_timer){ .loop = l, .ms = ms < 0 ? 0 : ms, .fn = fn, .user = user, .once = once };
	must(event_assign(&t->ev, l->base, -1, once ? 0 : EV_PERSIST, on_timer, t) == 0);
	return t;
}

void loop_timer_start(struct loop *l, int64_t ms, loop_fn fn, void *user, struct loop_timer **out)
{
	struct loop_timer *t = timer_new(l, ms, fn, user, true);

	if (!arm(t)) {
		t->next = l->late;
		l->late = t;
	}
	*out = t;
}

FALLIBLE enum err loop_every(struct loop *l, int64_t ms, loop_fn fn, void *user, struct loop_timer **out)
{
	struct loop_timer *t = timer_new(l, ms, fn, user, false);

	if (!arm(t)) {
		mem_free(t);
		return ERR(NO_MEMORY, "cannot make a timer");
	}
	*out = t;
	return OK;
}

void loop_timer_stop(struct loop_timer **t)
{
	if (!*t)
		return;
	list_remove(&(*t)->loop->late, *t);
	(void)event_del(&(*t)->ev);
	mem_free(*t);
	*t = NULL;
}

FALLIBLE enum err loop_watch(struct loop *l, int *fd, loop_fn fn, void *user, struct watch **out)
{
	TRY(watch_new(l->base, fd, fn, NULL, user, out));
	enum err e = watch_reads(*out, true);
	if (e)
		watch_free(out);
	return e;
}
