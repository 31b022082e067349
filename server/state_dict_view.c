/* state_dict_view.c: state dicts as the API shows them. */
#include <stdlib.h>

#include "base/jtext.h"
#include "base/mem.h"
#include "server/service_clock.h"
#include "server/state_dict_impl.h"

static uint64_t bytes_of(const struct state_dict *sd)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < state_dict_slots(sd); i++)
		sum += state_dict_nth(sd, i)->bytes;
	return sum;
}

void state_dict_put_head(const struct state_dict *sd, struct buf *out)
{
	char stamp[CLOCK_TEXT_MAX];
	int64_t newest = state_dict_newest(sd);

	buf_json_member(out, "{\"name\":", str_of(sd->name));
	buf_printf(out, ",\"world_size\":%u,\"slots\":%u,\"uid\":%u,\"bytes\":%ju,\"created_at\":\"%s\"", sd->world_size,
		   sd->slot_count, sd->uid, (uintmax_t)bytes_of(sd), clock_text(sd->created_ms, stamp));
	if (newest >= 0)
		buf_printf(out, ",\"generation\":%jd", (intmax_t)newest);
	else
		buf_puts(out, ",\"generation\":null");
	if (sd->orphaned_ms)
		buf_printf(out, ",\"orphaned_at\":\"%s\"", clock_text(sd->orphaned_ms, stamp));
	if (sd->on_owner_death) {
		char *text = jtext_of(sd->on_owner_death);
		if (!text)
			out->failed = ERR(NO_MEMORY, "cannot show a state dict");
		buf_printf(out, ",\"on_owner_death\":%s", text ? text : "null");
		mem_free(text);
	}
	state_dict_feed_put(sd, out);
	state_dict_replica_put(sd, out);
}

static const char *state_text(const struct slot *sl)
{
	switch (sl->state) {
	case SLOT_SEALED:
		return "sealed";
	case SLOT_LEAVING:
		return sl->filling ? "filling" : "sealed";
	case SLOT_OPEN:
		return sl->filling ? "filling" : "open";
	case SLOT_FREE:
	case SLOT_FREEING:
		return "free";
	default:
		return "open";
	}
}

static void put_users(const struct state_dict *sd, uint32_t rank, uint32_t slot, struct buf *out)
{
	const char *comma = "";

	buf_puts(out, ",\"in_use_by\":[");
	for (const struct state_dict_use *u = sd->uses; u; u = u->next)
		if (u->job[0] && u->ranks[rank].bytes && u->ranks[rank].slot == slot) {
			buf_printf(out, "%s\"%s\"", comma, u->job);
			comma = ",";
		}
	buf_puts(out, "]");
}

static void put_problem(const struct slot *sl, struct buf *out)
{
	CLEANUP(mem_free_ptr) char *text = jtext_of(state_dict_slot_problem(sl));

	if (text)
		buf_printf(out, ",\"problem\":%s", text);
}

static void put_rank(const struct state_dict *sd, uint32_t r, struct buf *out)
{
	int64_t lease = state_dict_lease_wall(sd, r);
	char stamp[CLOCK_TEXT_MAX];
	const char *comma = "";

	buf_printf(out, "{\"rank\":%u", r);
	if (lease)
		buf_printf(out, ",\"lease_expires_at\":\"%s\"", clock_text(lease, stamp));
	buf_puts(out, ",\"slots\":[");
	for (uint32_t k = 0; k < sd->slot_count; k++) {
		const struct slot *sl = state_dict_slot(sd, r, k);
		if (sl->bytes == 0)
			continue;
		buf_printf(out, "%s{\"slot\":%u,\"segment\":\"%s\",\"state\":\"%s\",\"bytes\":%ju", comma, k, sl->segment,
			   state_text(sl), (uintmax_t)sl->bytes);
		if (sl->state != SLOT_FREE && sl->state != SLOT_FREEING)
			buf_printf(out, ",\"generation\":%jd", (intmax_t)sl->generation);
		if (sl->image_bytes && (sl->state == SLOT_SEALED || sl->state == SLOT_LEAVING || sl->filling))
			buf_printf(out, ",\"image_bytes\":%ju", (uintmax_t)sl->image_bytes);
		put_problem(sl, out);
		put_users(sd, r, k, out);
		buf_puts(out, "}");
		comma = ",";
	}
	buf_puts(out, "]}");
}

FALLIBLE enum err state_dict_put(struct state_dicts *s, const struct principal *who, struct str name, struct buf *out)
{
	struct state_dict *sd;

	TRY(state_dict_find_to_read(s, who, name, &sd));
	state_dict_put_head(sd, out);
	buf_puts(out, ",\"ranks\":[");
	for (uint32_t r = 0; r < sd->world_size; r++) {
		if (r)
			buf_puts(out, ",");
		put_rank(sd, r, out);
	}
	buf_puts(out, "]}");
	return buf_status(out);
}

static int by_name(const void *a, const void *b)
{
	const struct state_dict *const *x = a, *const *y = b;

	return str_cmp(str_of((*x)->name), str_of((*y)->name));
}

/* The token is the last name shown: stable while others come and go. */
FALLIBLE enum err state_dict_list(struct state_dicts *s, const struct principal *who, uint32_t page_size, struct str page_token,
				  struct buf *out)
{
	const struct map *t = &s->table;
	struct state_dict **all = mem_zalloc(t->raw.count, sizeof *all);
	struct state_dict *sd;
	uint32_t n = 0, shown = 0;

	NEED(all, "cannot list state dicts");
	map_each(t, sd) {
		if (!sd->hidden && state_dict_may_read(who, sd) && (page_token.n == 0 || str_cmp(str_of(sd->name), page_token) > 0))
			all[n++] = sd;
	}
	qsort(all, n, sizeof *all, by_name);
	buf_puts(out, "{\"state_dicts\":[");
	for (; shown < n && shown < page_size; shown++) {
		if (shown)
			buf_puts(out, ",");
		state_dict_put_head(all[shown], out);
		buf_puts(out, "}");
	}
	buf_puts(out, "]");
	if (shown < n && shown > 0) {
		buf_json_member(out, ",\"next_page_token\":", str_of(all[shown - 1]->name));
	}
	buf_puts(out, "}");
	mem_free(all);
	return buf_status(out);
}

FALLIBLE enum err state_dict_list_replicas(struct state_dicts *s, const struct principal *who, const struct ref *of, bool of_run,
					   struct buf *out)
{
	const struct state_dict *sd;
	const char *comma = "";

	buf_puts(out, "{\"state_dicts\":[");
	map_each(&s->table, sd) {
		if (!state_dict_is_replica(sd, of, of_run) || !state_dict_may_read(who, sd))
			continue;
		buf_puts(out, comma);
		state_dict_put_head(sd, out);
		buf_puts(out, "}");
		comma = ",";
	}
	buf_puts(out, "]}");
	return buf_status(out);
}
