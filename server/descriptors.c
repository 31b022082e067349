/* descriptors.c: see descriptors.h. Whatever bytes come with the descriptors mean nothing and are dropped. A client that sends more
 * descriptors than are kept is cut off: what it would name next could not be there. So is one that sends more than BYTES_MAX bytes, which
 * would keep the loop at its socket for as long as it sends. */
#include "server/descriptors.h"

#include <stdio.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/list.h"
#include "base/vec.h"
#include "os/fs.h"

enum { BATCH = 253, TOKEN_BYTES = 16, BYTES_MAX = 64 << 10 };    /* BATCH: SCM_MAX_FD of the kernel */

struct descriptors_park {
	struct descriptors_park *next;
	struct descriptors *all;
	struct watch *socket;              /* NULL: the client has gone; the last hold frees the park */
	uid_t uid;
	uint32_t holds;
	loop_fn gone;                      /* of who has given the client a descriptor; NULL: nobody has */
	void *gone_user;
	uint64_t bytes;                    /* that have come with the descriptors */
	struct vec(int) fds;
	char token[DESCRIPTORS_TOKEN_MAX];
};

struct descriptors {
	struct loop *loop;
	struct descriptors_park *first;
	uint32_t parks;
	uint64_t fds, fds_max;
};

FALLIBLE enum err descriptors_new(struct loop *loop, struct descriptors **out)
{
	struct rlimit files;

	*out = mem_zalloc(1, sizeof **out);
	NEED(*out, "cannot take descriptors");
	(*out)->loop = loop;
	(*out)->fds_max = getrlimit(RLIMIT_NOFILE, &files) == 0 ? files.rlim_cur / 4 : 256; /* segments and clients need the most */
	return OK;
}

static void free_park(struct descriptors_park *p)
{
	loop_fn gone = p->gone;

	watch_free(&p->socket);
	p->token[0] = '\0';
	p->gone = NULL;
	if (gone)
		gone(p->gone_user);
	if (p->holds)
		return;
	list_remove(&p->all->first, p);
	p->all->parks--;
	p->all->fds -= p->fds.n;
	each(fd, p->fds.v, p->fds.n)
		close(*fd);
	vec_free(&p->fds);
	mem_free(p);
}

void descriptors_free(struct descriptors *d)
{
	list_each(p, d ? d->first : NULL) {
		p->holds = 0;
		free_park(p);
	}
	mem_free(d);
}

/* Half of what other users leave is a user's: then neither one user nor several keep another out. */
static bool is_fair(uint64_t own, uint64_t all, uint64_t more, uint64_t max)
{
	return own + more <= (max - (all - own) + 1) / 2;
}

static void count_own(const struct descriptors *d, uid_t uid, uint64_t *parks_out, uint64_t *fds_out)
{
	*parks_out = *fds_out = 0;
	for (const struct descriptors_park *p = d->first; p; p = p->next) {
		*parks_out += p->uid == uid;
		*fds_out += p->uid == uid ? p->fds.n : 0;
	}
}

static FALLIBLE enum err take(struct descriptors_park *p, const struct cmsghdr *c)
{
	uint64_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
	enum err e = vec_reserve(&p->fds, n);
	uint64_t parks, fds;

	count_own(p->all, p->uid, &parks, &fds);
	if (!e && (p->fds.n + n > DESCRIPTORS_MAX || !is_fair(fds, p->all->fds, n, p->all->fds_max)))
		e = ERR(BUSY, "too many descriptors");
	for (uint64_t i = 0; i < n; i++) {
		int fd;
		memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
		if (e) {
			close(fd);
			continue;
		}
		p->fds.v[p->fds.n++] = fd;
		p->all->fds++;
	}
	return e;
}

/* Takes what has come. false: the client has gone, or has sent too much. */
static bool drain(struct descriptors_park *p)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(BATCH * sizeof(int))];
	} control;
	char bytes[512];

	for (;;) {
		struct iovec v = { bytes, sizeof bytes };
		struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control };
		ssize_t n = recvmsg(watch_fd(p->socket), &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
		if (n < 0)
			return errno == EAGAIN || errno == EINTR;
		enum err e = OK;
		for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
			if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
				e = e ?: take(p, c);
		p->bytes += (uint64_t)n;
		if (e || n == 0 || p->bytes > BYTES_MAX || (m.msg_flags & MSG_CTRUNC))
			return false;
	}
}

static void on_readable(void *user)
{
	struct descriptors_park *p = user;

	if (!drain(p))
		free_park(p);
}

FALLIBLE enum err descriptors_check(const struct descriptors *d, const struct principal *who)
{
	uint64_t parks, fds;

	count_own(d, who->uid, &parks, &fds);
	if (is_fair(parks, d->parks, 1, DESCRIPTORS_PARKS_MAX))
		return OK;
	return ERR(BUSY, "%ju clients of uid %u hand over descriptors or have a device image, and %ju of other users: of %d, a user has "
		   "half of what others leave", (uintmax_t)parks, (unsigned)who->uid, (uintmax_t)(d->parks - parks), DESCRIPTORS_PARKS_MAX);
}

FALLIBLE enum err descriptors_open(struct descriptors *d, int *socket, const struct principal *who)
{
	unsigned char random[TOKEN_BYTES];
	char line[80];

	TRY(descriptors_check(d, who));
	if (getrandom(random, sizeof random, 0) != sizeof random)
		return ERR_SYS(SYSTEM, "cannot make a token");
	struct descriptors_park *p = mem_zalloc(1, sizeof *p);
	NEED(p, "cannot take descriptors");
	p->all = d;
	p->uid = who->uid;
	for (int i = 0; i < TOKEN_BYTES; i++)
		snprintf(p->token + 2 * i, 3, "%02x", random[i]);
	int n = snprintf(line, sizeof line, "{\"descriptors\":\"%s\"}\n", p->token);
	enum err e = loop_watch(d->loop, socket, on_readable, p, &p->socket);
	if (!e && send(watch_fd(p->socket), line, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL) != n)
		e = ERR_SYS(SYSTEM, "cannot tell a client its token");
	if (e) {
		watch_free(&p->socket);
		mem_free(p);
		return e;
	}
	p->next = d->first;
	d->first = p;
	d->parks++;
	return OK;
}

static FALLIBLE enum err find(struct descriptors *d, const struct principal *who, struct str token, struct descriptors_park **out)
{
	struct descriptors_park *p = d->first;

	while (p && !(p->socket && p->uid == who->uid && str_is(token, p->token)))
		p = p->next;
	if (p && !drain(p)) { /* what the client sent before its request is here, whatever the loop has seen of it */
		free_park(p);
		p = NULL;
	}
	if (!p)
		return ERR(NOT_FOUND, "no open connection has handed over descriptors under this token");
	*out = p;
	return OK;
}

FALLIBLE enum err descriptors_hold(struct descriptors *d, const struct principal *who, struct str token, struct descriptors_park **out)
{
	TRY(find(d, who, token, out));
	(*out)->holds++;
	return OK;
}

FALLIBLE enum err descriptors_give(struct descriptors *d, const struct principal *who, struct str token, int fd, loop_fn gone, void *user)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(int))];
	} control = { .room = { 0 } };
	struct iovec v = { (char[]){ "\n" }, 1 };
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	struct descriptors_park *p;

	TRY(find(d, who, token, &p));
	if (p->gone)
		return ERR(STATE_CONFLICT, "this connection was given a descriptor before: open another");
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof fd);
	memcpy(CMSG_DATA(c), &fd, sizeof fd);
	if (sendmsg(watch_fd(p->socket), &m, MSG_DONTWAIT | MSG_NOSIGNAL) != 1)
		return ERR_SYS(SYSTEM, "cannot give a client a descriptor");
	p->gone = gone;
	p->gone_user = user;
	return OK;
}

const int *descriptors_of(const struct descriptors_park *p, uint32_t *count_out)
{
	*count_out = p ? (uint32_t)p->fds.n : 0;
	return p ? p->fds.v : NULL;
}

void descriptors_drop(struct descriptors_park **at)
{
	struct descriptors_park *p = *at;

	*at = NULL;
	if (p && --p->holds == 0 && !p->socket)
		free_park(p);
}
