/* storage_impl.h: what the files storage*.c share; nobody else includes it. */
#pragma once
#include "server/storage.h"

enum { STORAGE_LEASE_MS = 600000, STORAGE_LEASE_MAX_MS = 86400000 };

struct storages {
	const struct config *config;
	struct journal *journal;
	struct events *events;
	struct storage *items[STORAGES_MAX];
	uint32_t count;
	struct storage *nodes;
	struct loop_timer *tick;        /* storage_care.c's */
};

FALLIBLE enum err storage_add(struct storages *all, struct str name, const char *path, struct storage **out);
void storage_remove(struct storages *all, struct storage *st);
