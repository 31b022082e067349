/* webhook_impl.h: shared by webhook.c and webhook_queue.c; nobody else includes it. */
#pragma once
#include "server/webhook.h"

struct delivery;
struct courier;

struct webhook {
	struct webhook *next;
	struct webhooks *all;
	char name[FOLLOWER_NAME_MAX + 1];
	uid_t uid;
	int64_t created_ms;            /* wall clock */
	json_t *doc;
	unsigned events;               /* bit: enum event_told */
	struct follower_filter filter; /* points into doc */
	struct loop_timer *timer;
	struct delivery *under_way;
	uint32_t count;                /* of them */
	uint64_t skipped;              /* deliveries that were dropped, when last counted */
	bool is_noted, is_gone;        /* gone: removed; freed with its last delivery */
};

struct webhooks {
	struct server *server;
	struct webhook *first;
	struct courier *sender;
	uint32_t count;
};

FALLIBLE enum err webhook_need(const struct server *s, const struct principal *who, struct str name, struct webhook **out);
void webhook_free(struct webhook *h);
void webhook_drop_deliveries(struct webhook *h);       /* those that are under way; after the sender's end */
