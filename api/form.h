/* form.h: the form in which the answer to a GET goes out: as JSON or as lines of JSON, compressed or not, or not at all because the client
 * has it. */
#pragma once
#include "api/coding.h"
#include "api/http.h"
#include "base/mem.h"

enum { FORM_ETAG_MAX = 64 };

struct form {
	enum coding coding;
	char etag[FORM_ETAG_MAX];      /* with its quotes; another one for each coding */
	bool same;                     /* the client has it: 304 */
	char *link;                    /* of a list that goes on: where; NULL; form_drop */
};

static inline void form_drop(struct form *f)
{
	mem_free(f->link);
}

/* Decides a GET's form: coding, and whether the client has it. mark: what changes with the answer, without quotes. */
void form_decide(const struct req *r, const char *mark, struct form *out);
/* Brings a GET's answer into its form. b is replaced; *type_io may be. ERR_NOT_ACCEPTABLE: it cannot be lines, but it can be JSON. */
FALLIBLE enum err form_apply(struct req *r, const char **type_io, struct buf *b, struct form *out);
FALLIBLE enum err form_dress(const struct form *f, struct MHD_Response *m);
