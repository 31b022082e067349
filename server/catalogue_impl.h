/* catalogue_impl.h: how the catalogue's files ask for what is known of a storage's checkpoints. */
#pragma once
#include "server/catalogue.h"

/* Asks "find" or "runs" (worker/ctl/README.md) of the storage, again and again until the answer is whole. wait_ms: ERR_BUSY after so long;
 * 0: never. Takes `question`; NULL: there was no memory for it. */
void catalogue_ask(struct server *s, const char *storage, json_t *question, int64_t wait_ms, catalogue_fn fn, void *user);
