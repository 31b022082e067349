/* gang_rendezvous.h: how the members of a communication group find each other through the coordinator: RENDEZVOUS and RENDEZVOUS_ALL of
 * worker/ctl/README.md. Their messages are passed on unread. */
#pragma once
#include <jansson.h>
#include "base/err.h"

struct gang_rendezvous {
	json_t *all;                    /* of the round that is going on; NULL: none is */
	uint32_t come;
	json_int_t round;
};

/* Takes the RENDEZVOUS of worker `index` of `count`. *all_out: the body of RENDEZVOUS_ALL for workers 0 to its size - 1, to be released,
 * when this was the last; else NULL. ERR_PROTOCOL: it does not fit the round. */
FALLIBLE enum err gang_rendezvous_take(struct gang_rendezvous *m, uint32_t index, uint32_t count, const json_t *body, json_t **all_out);
/* The first member that has not come yet; -1: nobody is awaited. */
int64_t gang_rendezvous_missing(const struct gang_rendezvous *m);
void gang_rendezvous_drop(struct gang_rendezvous *m);
