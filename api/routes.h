/* routes.h: the table of everything that can be asked, in one place. The contract (openapi.yaml) lists the same paths and methods;
 * a test compares the two. */
#pragma once
#include "api/http.h"

enum route_body { ROUTE_NO_BODY, ROUTE_BODY, ROUTE_BODY_MAY };

struct route {
	const char *method;
	const char *path;            /* "/v1/jobs/{id}:cancel" */
	enum err (*handler)(struct req *r);
	enum route_body body;
	bool open;                   /* needs no token */
	bool changes;                /* refused while the daemon drains, or cannot write its journal */
};

/* Finds r->route and fills in r->parts; authenticates. r->route stays NULL for OPTIONS. ERR_NOT_FOUND, ERR_METHOD_NOT_ALLOWED
 * (r->allow is set), ERR_UNAUTHENTICATED, ERR_INVALID_REQUEST. */
FALLIBLE enum err routes_find(struct req *r);
FALLIBLE enum err routes_options(struct req *r);       /* the answer to OPTIONS */
/* Counts the answer that is being sent. Cheap: /metrics hands the counts on. */
void routes_count(const struct req *r);
void routes_flush_metrics(struct api *a);
