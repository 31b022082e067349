/* principal.c: who may touch what. */
#include "server/principal.h"

#include <unistd.h>

struct principal principal_of(uid_t uid)
{
	return (struct principal){ .uid = uid, .admin = uid == 0 || uid == geteuid() };
}

bool principal_may(const struct principal *p, uid_t owner)
{
	return p->admin || p->uid == owner;
}
