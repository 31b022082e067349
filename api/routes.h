/* routes.h: the table of everything that can be asked, in one place. The contract (openapi.yaml) lists the same paths and methods;
 * a test compares the two. */
#pragma once
#include "api/http.h"

/* Finds r->route and fills in r->parts; authenticates. r->route stays NULL for OPTIONS. ERR_NOT_FOUND, ERR_METHOD_NOT_ALLOWED
 * (r->allow is set), ERR_UNAUTHENTICATED, ERR_INVALID_REQUEST. */
FALLIBLE enum err routes_find(struct req *r);
FALLIBLE enum err routes_options(struct req *r);       /* the answer to OPTIONS */
