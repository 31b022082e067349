/* copied.h: `.dcpd-copied.json`, the page that a copy of a whole folder has beside the files that it was made of.
 *
 * The copy's other files are those of the source, byte for byte, its manifest too, which names the job and the owner of the source. So the
 * page says what the copy has of its own: the job that made it (a recovery finds its commit by that), the owner (owner.h), and the
 * checkpoint that it was copied from. It has the form of a manifest without items (manifest.h), whose `files` are all files that were
 * copied: what dcpd brought, dcpd may replace.
 *
 *     {"dcpd":1,"job":"01J…","attempt":1,"kind":"replicate","created_at":"…","uid":1000,"world_size":2,"bytes":…,"metadata":{…},
 *      "source":{"storage":"main","name":"run1/step-100","etag":"…","job":"01H…"},"files":[{"name","bytes","items":[]},…],
 *      "self_xxh3_128":"…"}
 *
 * Of a checkpoint that is one file the page lies beside it (beside.h), with the source's record in front of "source". */
#pragma once
#include <jansson.h>

#include "base/buf.h"
#include "store/contents.h"

#define COPIED_NAME ".dcpd-copied.json"

struct staging;
struct copied {
	const char *job, *kind;
	uint64_t attempt, world_size;
	uint32_t uid;
	const char *storage, *name, *identity, *source_job;    /* of the source; source_job: that made it, "": not known */
	const struct contents *files;
	/* Of a copy that is one file: its time of writing goes into the page, and the source's record, for it has no manifest besides. */
	const struct staging *staged;          /* else NULL */
	const json_t *record;                  /* NULL: none */
};
FALLIBLE enum err copied_put(struct buf *b, const struct copied *c);
/* Appends `,"copied_from":{"storage","name","etag","job"?}` of the copy whose page that is; nothing, if it is none or damaged. */
void copied_put_source(struct store_at folder, const char *page, struct buf *out);
