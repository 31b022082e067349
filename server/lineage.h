/* lineage.h: what a checkpoint was made of, and what was made of it, as the records of checkpoints tell (worker/store/record.h).
 *
 * A record names its parents as they were: storage, name, the job that had made them, their content digest. What lies at that name now is
 * the same checkpoint, another one that took its place, or nothing. Only what is the same is followed further. */
#pragma once
#include "base/buf.h"
#include "base/err.h"

struct server;

enum { LINEAGE_NODES_MAX = 1000, LINEAGE_DEPTH_MAX = 64 };

typedef void (*lineage_fn)(void *user, enum err e, struct buf *out);
/* {"checkpoint":{"storage","name"},
 * "nodes":[{"storage","name","found","job"?,"kind"?,"durable_at"?,"step"?,"content_digest"?}],
 * "edges":[{"parent":"main:a","child":"main:b","role","state":"same"|"replaced"|"removed"|"unknown"}],"truncated":bool}:
 * of the checkpoint's own storage, and of all storages that records in one that was looked at name as a parent's. ERR_NOT_FOUND. */
void lineage_find(struct server *s, const char *storage, const char *name, lineage_fn fn, void *user);
