/* takeover.c: see takeover.h. */
#include "server/takeover.h"

/* A third of the lease is for clocks that do not run alike, and for what the request took. */
enum takeover_gate takeover_gate(int64_t token, int64_t renewed_ms, int64_t ttl_ms, int64_t now_ms)
{
	if (!token)
		return TAKEOVER_GO;
	return renewed_ms && now_ms - renewed_ms < ttl_ms - ttl_ms / 3 ? TAKEOVER_GO : TAKEOVER_ASK;
}

enum takeover_gate takeover_after(enum takeover_answer answer)
{
	return answer == TAKEOVER_OTHERS ? TAKEOVER_MOVED : TAKEOVER_GO;
}

bool takeover_may_take(const struct takeover_offer *o)
{
	return o->owner_is_away && o->has_storages && o->takes_work && o->has_record;
}

/* Nodes' clocks may be minutes apart, so ids of several daemons count only where etcd does not know both jobs. Two that were there at once
 * may have committed in any order. */
bool takeover_is_later(const struct takeover_found *f)
{
	if (f->by_one_daemon || !f->has_records)
		return f->id_is_later;
	return !f->other_ended || f->other_changed > f->own_made;
}

enum takeover_end takeover_end(const struct takeover_outcome *o)
{
	if (o->fenced)
		return TAKEOVER_GIVEN_UP;
	if (o->was_asked)
		return o->committed ? TAKEOVER_SUCCEEDED : TAKEOVER_FAILED;
	return o->failed ? TAKEOVER_FAILED : TAKEOVER_SUCCEEDED;
}

enum takeover_own takeover_own(const struct takeover_known *k)
{
	if (!k->in_live && !k->has_record)
		return k->was_known ? TAKEOVER_IS_GONE : TAKEOVER_REGISTER;
	if (!k->in_live)
		return k->record_is_own && k->record_turn <= k->row_turn ? TAKEOVER_REGISTER : TAKEOVER_IS_GONE;
	if (!k->has_row)
		return TAKEOVER_TAKE_UP;
	if (k->record_turn > k->row_turn)
		return k->is_moved ? TAKEOVER_TAKE_UP : TAKEOVER_YIELD;
	return k->is_moved ? TAKEOVER_FORGET : TAKEOVER_GO_ON;
}
