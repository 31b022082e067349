/* webhook_impl.h: shared by webhook.c and webhook_queue.c; nobody else includes it. */
#pragma once
#include "server/webhook.h"

struct delivery;
struct courier;

struct webhook {
	struct follower base;
	unsigned events;               /* bit: enum event_told */
	struct follower_filter filter; /* points into the document */
	struct loop_timer *timer;
	struct delivery *under_way;
	uint32_t count;                /* of them */
	uint64_t skipped;              /* deliveries that were dropped, when last counted */
	bool is_noted, is_gone;        /* gone: removed; freed with its last delivery */
};

static inline struct webhook *webhook_of(struct follower *f)
{
	return (struct webhook *)(void *)f;
}

void webhook_free(struct webhook *h);
void webhook_drop_deliveries(struct webhook *h);       /* those that are under way; after the sender's end */
