/* counts.c: see counts.h. */
#include "api/counts.h"

#include <stdio.h>

#include "api/api_impl.h"
#include "api/stream.h"
#include "server/metrics.h"
#include "server/parts.h"
#include "server/unread.h"

void counts_note(const struct req *r)
{
	struct route_count *n = &r->api->answered[r->row];
	size_t code = r->status / 100;

	n->route = r->row ? r->route : NULL;
	if (code < API_CODES)
		n->codes[code]++;
}

void counts_flush(struct api *a)
{
	struct metrics *m = a->core->metrics;
	char labels[256];

	for (size_t i = 0; i < API_ROUTES_MAX; i++)
		for (size_t c = 1; c < API_CODES; c++) {
			struct route_count *n = &a->answered[i];
			if (!n->codes[c])
				continue;
			snprintf(labels, sizeof labels, "route=\"%s\",method=\"%s\",code=\"%zuxx\"", n->route ? n->route->path : "other",
				 n->route ? n->route->method : "any", c);
			metrics_add(m, "dcpd_http_requests_total", labels, (double)n->codes[c]);
			n->codes[c] = 0;
		}
	metrics_set(m, "dcpd_http_connections", "", http_connections(a->http));
	metrics_set(m, "dcpd_http_streams", "", streams_open(a->streams));
	metrics_set(m, "dcpd_http_unread_bytes", "", (double)unread_bytes(a->core->unread));
}
