/* auth.c: who is calling. On the Unix socket the kernel says it (peer credentials); on TCP only a token proves anything, and its
 * holder counts as dcpd's own user. */
#include <grp.h>
#include <stdio.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "api/api_impl.h"
#include "api/guard.h"
#include "base/mem.h"
#include "server/cluster.h"

enum { GROUPS_MAX = 65536 };

const char *const auth_scope_names[] = { [SCOPE_READ] = "read", [SCOPE_SUBMIT] = "submit", [SCOPE_ADMIN] = "admin" };

static bool in_group(int fd, const struct ucred *peer, gid_t group)
{
	socklen_t bytes = 0;
	bool found = peer->gid == group;

	if (found)
		return true;
	/* The first call fails with ERANGE and says how many there are. */
	(void)getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, NULL, &bytes);
	if (bytes == 0 || bytes > GROUPS_MAX * sizeof(gid_t))
		return false;
	CLEANUP(mem_free_ptr) gid_t *groups = mem_alloc(bytes);
	if (!groups || getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, groups, &bytes) != 0)
		return false;
	for (size_t i = 0; i < bytes / sizeof *groups; i++)
		found |= groups[i] == group;
	return found;
}

void auth_peer(struct api *a, int fd, bool is_unix, struct caller *out)
{
	struct ucred peer = { 0 };
	socklen_t bytes = sizeof peer;

	*out = (struct caller){ .uid = geteuid(), .over_unix = is_unix, .scope = SCOPE_ADMIN };
	if (!is_unix)
		return;
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0 || bytes != sizeof peer) {
		out->uid = (uid_t)-1;
		return;
	}
	out->uid = peer.uid;
	out->pid = peer.pid;
	out->admin = peer.uid == 0 || peer.uid == geteuid();
	out->known = out->admin || (a->has_group && in_group(fd, &peer, a->group));
}

FALLIBLE enum err auth_need(const struct req *r)
{
	if (r->caller.known)
		return OK;
	if (req_head(r, MHD_HTTP_HEADER_AUTHORIZATION))
		return ERR(UNAUTHENTICATED, "the token is not that of dcpd's state directory (dcpctl and Python take it from DCPD_TOKEN or "
			   "DCPD_TOKEN_FILE)");
	if (r->caller.over_unix)
		return ERR(UNAUTHENTICATED, "uid %d is not root, not dcpd's own and not in --allow-group: send a token "
			   "(DCPD_TOKEN or DCPD_TOKEN_FILE for dcpctl and Python)", (int)r->caller.uid);
	return ERR(UNAUTHENTICATED, "send Authorization: Bearer with the token of dcpd's state directory (dcpctl and Python take it from "
		   "DCPD_TOKEN or DCPD_TOKEN_FILE)");
}

static enum scope needed(const struct req *r)
{
	if (r->route->scope != SCOPE_BY_METHOD)
		return r->route->scope;
	return strcmp(r->route->method, "GET") == 0 ? SCOPE_READ : SCOPE_SUBMIT;
}

FALLIBLE enum err auth_scope(const struct req *r, enum scope least)
{
	if (r->caller.scope >= least)
		return OK;
	return ERR(FORBIDDEN, "the token \"%s\" has the scope %s; this needs %s", r->caller.token, auth_scope_names[r->caller.scope],
		   auth_scope_names[least]);
}

FALLIBLE enum err auth_route(const struct req *r)
{
	if (r->caller.images_only && !r->route->image)
		return ERR(FORBIDDEN, "this is not for workers of other nodes");
	return r->route->open ? OK : auth_scope(r, needed(r));
}

/* Takes a decimal number and the one space behind it off the text. */
static bool take_number(struct str *text, uint64_t max, uint64_t *out)
{
	const char *space = memchr(text->p, ' ', text->n);
	size_t n = space ? (size_t)(space - text->p) : 0;

	if (!space || !str_to_u64((struct str){ text->p, n }, out) || *out > max)
		return false;
	*text = (struct str){ space + 1, text->n - n - 1 };
	return true;
}

/* The header is taken in the form of auth_put_caller() alone: a sign or an overflow would make a request root's or another user's. */
FALLIBLE enum err auth_of_node(struct req *r)
{
	const char *head = req_head(r, CLUSTER_CALLER_HEAD);
	struct str text = str_of(head ?: "");
	uint64_t uid, scope, admin;

	if (!take_number(&text, UINT32_MAX - 1, &uid) || !take_number(&text, SCOPE_ADMIN, &scope) || scope < SCOPE_READ ||
	    !take_number(&text, 1, &admin) || text.n == 0 || text.n > TOKEN_NAME_MAX || memchr(text.p, ' ', text.n))
		return ERR(INVALID_REQUEST, "%s is missing, or not what a node sends", CLUSTER_CALLER_HEAD);
	r->caller = (struct caller){ .uid = (uid_t)uid, .known = true, .admin = admin == 1, .scope = (enum scope)scope, .is_node = true };
	if (!str_is(text, "-"))
		snprintf(r->caller.token, sizeof r->caller.token, "%s", text.p);
	return OK;
}

void auth_put_caller(const struct req *r, struct buf *b)
{
	buf_printf(b, "%s: %u %u %u %s", CLUSTER_CALLER_HEAD, (unsigned)r->caller.uid, (unsigned)r->caller.scope, (unsigned)r->caller.admin,
		   r->caller.token[0] ? r->caller.token : "-");
}
