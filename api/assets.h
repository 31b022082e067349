/* assets.h: files that are part of the binary: the page, the API's contract, ready conversion rules. */
#pragma once
#include "api/http.h"

struct asset {
	const char *path;                /* as in the source tree: "web/index.html" */
	const unsigned char *begin, *end;
};
extern const struct asset assets[];      /* made by the Makefile; ends with a NULL path */

const struct asset *assets_find(const char *path);       /* NULL: there is none */
/* Answers with the file, compressed if the client takes that; 304 if the client has it. */
FALLIBLE enum err assets_send(struct req *r, const char *content_type, const struct asset *a);

struct assets_packed;
FALLIBLE enum err assets_packed_new(struct assets_packed **out);
void assets_packed_free(struct assets_packed *p);        /* after http_free(): answers point into it. Accepts NULL */
