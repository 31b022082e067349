/* unread.c: see unread.h. */
#include "server/unread.h"

#include "base/mem.h"
#include "server/loop.h"
#include "server/parts.h"

struct unread {
	uint64_t bytes;
	done_fn on_room;
	void *user;
	bool told;                    /* on_room is about to be called */
};

FALLIBLE enum err unread_new(struct server *s)
{
	s->unread = mem_zalloc(1, sizeof *s->unread);
	return s->unread ? OK : ERR(NO_MEMORY, "cannot count answers");
}

void unread_free(struct unread *u)
{
	mem_free(u);
}

void unread_listen(struct server *s, done_fn fn, void *user)
{
	s->unread->on_room = fn;
	s->unread->user = user;
}

static uint64_t counted(uint64_t bytes)
{
	return bytes > UNREAD_SMALL ? bytes : 0;
}

bool unread_take(struct server *s, uint64_t bytes)
{
	struct unread *u = s->unread;
	uint64_t n = counted(bytes);

	if (n > 0 && u->bytes > 0 && (u->bytes >= UNREAD_MAX || n > UNREAD_MAX - u->bytes))
		return false;
	u->bytes += n;
	return true;
}

void unread_add(struct server *s, uint64_t bytes)
{
	s->unread->bytes += counted(bytes);
}

static void tell(void *user, enum err e)
{
	struct unread *u = user;

	u->told = false;
	u->on_room(u->user, e);
}

void unread_shrink(struct server *s, uint64_t taken, uint64_t needed)
{
	struct unread *u = s->unread;
	uint64_t n = counted(taken) - counted(needed);

	must(needed <= taken && n <= u->bytes);
	u->bytes -= n;
	if (n == 0 || !u->on_room || u->told)
		return;
	u->told = true;
	loop_later(s->loop, tell, u, OK);
}

void unread_give(struct server *s, uint64_t taken)
{
	unread_shrink(s, taken, 0);
}

uint64_t unread_bytes(const struct server *s)
{
	return s->unread->bytes;
}
