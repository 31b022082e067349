/* unread.c: see unread.h. */
#include "server/unread.h"

#include "base/mem.h"
#include "server/loop.h"

struct unread {
	struct loop *loop;
	uint64_t bytes;
	done_fn on_room;
	void *user;
	bool told;                    /* on_room is about to be called */
};

FALLIBLE enum err unread_new(struct loop *loop, struct unread **out)
{
	*out = mem_zalloc(1, sizeof **out);
	NEED(*out, "cannot count answers");
	(*out)->loop = loop;
	return OK;
}

void unread_free(struct unread *u)
{
	mem_free(u);
}

void unread_listen(struct unread *u, done_fn fn, void *user)
{
	u->on_room = fn;
	u->user = user;
}

static uint64_t counted(uint64_t bytes)
{
	return bytes > UNREAD_SMALL ? bytes : 0;
}

bool unread_take(struct unread *u, uint64_t bytes)
{
	uint64_t n = counted(bytes);

	if (n > 0 && u->bytes > 0 && (u->bytes >= UNREAD_MAX || n > UNREAD_MAX - u->bytes))
		return false;
	u->bytes += n;
	return true;
}

void unread_add(struct unread *u, uint64_t bytes)
{
	u->bytes += counted(bytes);
}

static void tell(void *user, enum err e)
{
	struct unread *u = user;

	u->told = false;
	u->on_room(u->user, e);
}

void unread_shrink(struct unread *u, uint64_t taken, uint64_t needed)
{
	uint64_t n = counted(taken) - counted(needed);

	must(needed <= taken && n <= u->bytes);
	u->bytes -= n;
	if (n == 0 || !u->on_room || u->told)
		return;
	u->told = true;
	loop_later(u->loop, tell, u, OK);
}

void unread_give(struct unread *u, uint64_t taken)
{
	unread_shrink(u, taken, 0);
}

uint64_t unread_bytes(const struct unread *u)
{
	return u->bytes;
}
