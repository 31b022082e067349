/* principal.c: who may touch what. */
#include "server/principal.h"

bool principal_may(const struct principal *p, uid_t owner)
{
	return p->admin || p->uid == owner;
}
