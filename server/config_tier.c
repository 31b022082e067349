/* config_tier.c: `tier.NAME = STORAGE` and its options, as rows: which storages have another one behind them (server/tier.h). */
#include "server/config.h"

#include <string.h>

#include "base/num.h"

static bool is_storage(const struct config *c, struct str name)
{
	for (uint32_t i = 0; i < c->storage.count; i++)
		if (strcspn(c->storage.items[i], "=") == name.n && memcmp(c->storage.items[i], name.p, name.n) == 0)
			return true;
	return false;
}

static FALLIBLE enum err find_or_add(struct config *c, struct str storage, struct config_tier **out)
{
	for (uint32_t i = 0; i < c->tier_count; i++)
		if (str_is(storage, c->tiers[i].storage)) {
			*out = &c->tiers[i];
			return OK;
		}
	if (!is_storage(c, storage))
		return ERR(CONFIG, "tier.%.*s: there is no such storage", (int)num_min(storage.n, 64), storage.p);
	*out = &c->tiers[c->tier_count++]; /* no more of them than storages */
	memcpy((*out)->storage, storage.p, storage.n);
	return OK;
}

static FALLIBLE enum err set_target(const struct config *c, struct config_tier *t, struct str target)
{
	if (!is_storage(c, target) || str_is(target, t->storage))
		return ERR(CONFIG, "tier.%s: \"%.*s\" is no other storage", t->storage, (int)num_min(target.n, 64), target.p);
	memset(t->target, 0, sizeof t->target);
	memcpy(t->target, target.p, target.n);
	return OK;
}

static FALLIBLE enum err set_option(struct config_tier *t, struct str key, struct str value)
{
	if (str_is(key, "behind") && str_to_u64(value, &t->behind) && t->behind > 0)
		return OK;
	if (str_is(key, "order") && (str_is(value, "all") || str_is(value, "newest"))) {
		t->newest = str_is(value, "newest");
		return OK;
	}
	if (str_is(key, "pace") && (str_is(value, "full") || str_is(value, "background"))) {
		t->background = str_is(value, "background");
		return OK;
	}
	return ERR(CONFIG, "tier.%s.%.*s = %.*s: known are behind = N, order = all|newest and pace = full|background", t->storage,
		   (int)num_min(key.n, 64), key.p, (int)num_min(value.n, 64), value.p);
}

static FALLIBLE enum err take(struct config *c, const char *item)
{
	size_t n = strcspn(item, "="), dot = strcspn(item, ".=");
	struct str value = item[n] ? str_of(item + n + 1) : STR(""), storage = { item, dot };
	struct config_tier *t = NULL;

	if (!item[n])
		return ERR(CONFIG, "tier \"%.100s\" is not NAME=STORAGE", item);
	TRY(find_or_add(c, storage, &t));
	return dot < n ? set_option(t, (struct str){ item + dot + 1, n - dot - 1 }, value) : set_target(c, t, value);
}

/* From tier to tier a chain ends. */
static FALLIBLE enum err check(const struct config *c, const struct config_tier *first)
{
	const struct config_tier *t = first;

	if (!first->target[0])
		return ERR(CONFIG, "tier.%s has options, and no storage: tier.%s = STORAGE", first->storage, first->storage);
	for (uint32_t steps = 0; t; steps++) {
		const struct config_tier *next = NULL;
		if (steps > c->tier_count)
			return ERR(CONFIG, "tier.%s leads back to itself", first->storage);
		for (uint32_t i = 0; i < c->tier_count; i++)
			if (strcmp(c->tiers[i].storage, t->target) == 0)
				next = &c->tiers[i];
		t = next;
	}
	return OK;
}

FALLIBLE enum err config_tier_derive(struct config *c)
{
	c->tier_count = 0;
	for (uint32_t i = 0; i < c->tier.count; i++)
		TRY(take(c, c->tier.items[i]));
	for (uint32_t i = 0; i < c->tier_count; i++)
		TRY(check(c, &c->tiers[i]));
	return OK;
}
