/* record.h: what a checkpoint's own files tell of where it comes from: the job that made it, its parents, labels and metrics. The record
 * lies beside the bytes and is committed with them, so that it survives a lost journal and goes along with a copied folder.
 *
 *   {"made_by":{"job":"01J…","kind":"save","attempt":1,"version":"0.9.0","plan_digest":"32 hex digits","uid":1000},
 *    "durable_at":"2026-11-23T07:20:00.120Z","generation":7,"labels":{"run":"r1"},"metrics":{"loss":1.5},
 *    "parents":[{"role":"source","storage":"main","name":"run1/step-1","job":"01J…","content_digest":"32 hex digits"}],
 *    "bytes_shared":0,"content_digest":"32 hex digits"}            (or, where the job could not tell, "content_unknown":why)
 *
 * The manifest (manifest.h; of a checkpoint that is one file the page beside it, beside.h) has it as its second member, with a digest of
 * its own behind it, in front of everything that grows with the checkpoint: a list of thousands reads the first page of each manifest and
 * no more. A manifest of an older dcpd has no record; job, kind, attempt, uid, generation and created_at stand at the front there too, and
 * make one.
 *
 * Anybody may have written these files. What is not a record of this form, or does not go with the metadata that lies there now, is told in
 * one line (`record_problem`) and counts for nothing else: the checkpoint is listed and loaded as one without a record. */
#pragma once
#include <jansson.h>

#include "base/buf.h"
#include "store/manifest.h"
#include "store/store.h"

enum { RECORD_BYTES_MAX = 256 << 10, RECORD_METRICS_MAX = 64, RECORD_LABELS_MAX = 32, RECORD_PARENTS_MAX = 18,
       RECORD_PROBLEM_MAX = 300 };

struct record {
	json_t *doc;                   /* an object of the members above, checked; empty: the files tell nothing */
	char problem[RECORD_PROBLEM_MAX];      /* why the text that is there is not believed; "" */
};

void record_free(struct record *r);                /* for CLEANUP */
/* Of the manifest `manifest` in an open folder; ERR_NO_MEMORY, or what the storage fails with. */
FALLIBLE enum err record_of_dir(struct store_at dir, const char *manifest, struct record *out);
/* Of the checkpoint at `name` of the folder: a directory, or one file, whose page lies beside it (beside.h) and counts for no other one.
 * ERR_NOT_FOUND. */
FALLIBLE enum err record_of(struct store_at folder, const char *name, struct record *out);
/* Reads the front of a manifest; `whole`: there is no more of it than these bytes. Fails, with why, where it holds no record; metadata is
 * then untouched, else what the manifest says of the metadata that it was written with (name "": nothing). */
struct record_metadata {
	char name[64], save_id[40];
	uint64_t bytes;
	unsigned char xxh3_128[16];
	struct manifest_file file;     /* the first one listed: bytes and mtime_ns; zeros: the text ends in front of them */
};
FALLIBLE enum err record_parse(struct str front, json_t **doc_out, struct record_metadata *metadata);
/* Appends ,"record":{…},"record_xxh3_128":"…" for a manifest. doc: of that form; ERR_LIMIT_EXCEEDED. */
FALLIBLE enum err record_put(struct buf *b, const json_t *doc);
/* Appends the members that lists show, each with a comma in front: those of the record, and step: the number at the end of the name, else
 * the generation, else null. */
FALLIBLE enum err record_put_members(struct buf *b, const struct record *r, const char *name);
