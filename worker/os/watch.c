/* watch.c: see watch.h. Two events rather than one whose flags change: libevent changes flags by removing and adding, and a callback
 * that frees the watch must also stop the other callback that is already due in this turn of the loop. */
#include "os/watch.h"

#include <event2/event.h>
#include <event2/event_struct.h>
#include <unistd.h>

#include "base/mem.h"

struct watch {
	int fd;
	struct event read, write;      /* write: unused without an on_write */
	bool reading, writing;
	watch_fn on_read, on_write;
	void *user;
};

static void on_event(evutil_socket_t, short what, void *user)
{
	const struct watch *w = user;

	(what & EV_READ ? w->on_read : w->on_write)(w->user);
}

static void drop_events(struct watch *w)
{
	(void)event_del(&w->read);
	if (w->on_write)
		(void)event_del(&w->write);
}

enum err watch_new(struct event_base *base, int *fd, watch_fn on_read, watch_fn on_write, void *user, struct watch **out)
{
	struct watch *w = mem_zalloc(1, sizeof *w);

	NEED(w, "cannot watch a descriptor");
	*w = (struct watch){ .fd = *fd, .on_read = on_read, .on_write = on_write, .user = user };
	if (event_assign(&w->read, base, *fd, EV_READ | EV_PERSIST, on_event, w) != 0 ||
	    (on_write && event_assign(&w->write, base, *fd, EV_WRITE | EV_PERSIST, on_event, w) != 0)) {
		mem_free(w);
		return ERR(INTERNAL, "cannot watch a descriptor");
	}
	*fd = -1;
	*out = w;
	return OK;
}

int watch_take(struct watch **w)
{
	int fd = watch_fd(*w);

	if (*w)
		drop_events(*w);
	mem_free(*w);
	*w = NULL;
	return fd;
}

void watch_free(struct watch **w)
{
	int fd = watch_take(w);

	if (fd >= 0)
		close(fd);
}

int watch_fd(const struct watch *w)
{
	return w ? w->fd : -1;
}

static FALLIBLE enum err set(struct event *ev, bool *is, bool on)
{
	if (*is == on)
		return OK;
	if (on ? event_add(ev, NULL) : event_del(ev))
		return ERR_SYS(NO_MEMORY, "cannot watch a descriptor");
	*is = on;
	return OK;
}

static FALLIBLE enum err set_none(bool on)
{
	return on ? ERR(INTERNAL, "cannot watch a descriptor that was closed") : OK;
}

enum err watch_reads(struct watch *w, bool on)
{
	return w ? set(&w->read, &w->reading, on) : set_none(on);
}

enum err watch_writes(struct watch *w, bool on)
{
	return w ? set(&w->write, &w->writing, on) : set_none(on);
}

bool watch_is_writing(const struct watch *w)
{
	return w && w->writing;
}
