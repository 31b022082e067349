/* group.c: see group.h. */
#include "session/group.h"

#include "base/buf.h"
#include "session/gpu.h"

struct kept_group {
	struct comm *comm;             /* the NCCL group; NULL: no group is kept */
	uint64_t id;                   /* the group's id, the same on all members */
	uint32_t size, deadline_ms;
	struct group_meeting meeting;  /* how the members meet in the current job */
};

enum err group_secret(const json_t *group, unsigned char out[COMM_SECRET_BYTES])
{
	const char *hex = json_string_value(json_object_get(group, "secret"));

	if (!hex || strlen(hex) != 2 * COMM_SECRET_BYTES)
		return ERR(PROTOCOL, "a group without a secret");
	if (buf_unhex(str_of(hex), out, COMM_SECRET_BYTES))
		return ERR(PROTOCOL, "a group's secret that is not hexadecimal");
	return OK;
}

enum err group_meet(struct group_meeting *m, const unsigned char mine[COMM_RENDEZVOUS_BYTES], unsigned char *all_out)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(4096);
	CLEANUP(json_decrefp) json_t *all = NULL;

	buf_printf(&b, "{\"round\":%u,\"size\":%u,\"data\":\"", m->round++, m->size);
	buf_base64(&b, mine, COMM_RENDEZVOUS_BYTES);
	buf_puts(&b, "\"}");
	TRY(buf_status(&b));
	TRY(job_rendezvous(m->job, (struct str){ (char *)b.p, b.len }, m->deadline_ms, &all));
	size_t n = json_array_size(all);
	enum err e = n == m->size ? OK : ERR(PROTOCOL, "a meeting of %zu members, not %u", n, m->size);
	for (uint32_t i = 0; !e && i < m->size; i++) {
		CLEANUP(buf_free) struct buf one = BUF_INIT(COMM_RENDEZVOUS_BYTES);
		const char *text = json_string_value(json_array_get(all, i));
		if (!text || buf_unbase64(&one, str_of(text)) || one.len != COMM_RENDEZVOUS_BYTES)
			e = ERR(PROTOCOL, "what member %u says of itself is not %d bytes of base64", i, COMM_RENDEZVOUS_BYTES);
		else
			memcpy(all_out + (size_t)i * COMM_RENDEZVOUS_BYTES, one.p, COMM_RENDEZVOUS_BYTES);
	}
	return e;
}

static enum err meet(void *user, const unsigned char mine[COMM_RENDEZVOUS_BYTES], unsigned char *all_out)
{
	return group_meet(user, mine, all_out);
}

static enum err tick(void *user)
{
	return job_tick(((struct group_meeting *)user)->job);
}

/* A member's offer, which it tells the others before a job. */
struct offer {
	uint64_t id;                   /* id of the group that this member has kept; 0: none, or a group of no use */
};

static FALLIBLE enum err read_spec(const struct job *j, const json_t *doc, uint32_t rank, uint32_t size, struct comm_spec *out)
{
	json_int_t deadline = json_integer_value(json_object_get(doc, "deadline_ms"));
	const char *backend = json_string_value(json_object_get(doc, "backend"));

	if (!backend)
		return ERR(PROTOCOL, "a group without a back end");
	*out = (struct comm_spec){ .rank = rank, .size = size, .generation = j->generation, .arena_fd = -1,
				   .group_id = (uint64_t)json_integer_value(json_object_get(doc, "group_id")),
				   .deadline_ms = deadline > 0 ? (uint32_t)deadline : 30000,
				   .listen = j->worker->listen[0] ? j->worker->listen : NULL, .meet = meet, .tick = tick };
	out->inside = out->between = strcmp(backend, "nccl") == 0 ? COMM_NCCL : COMM_TCP;
	return group_secret(doc, out->secret);
}

/* If one member has no group, or its group has failed, all members open a new one, and those that kept the old one close it. */
static FALLIBLE enum err agree_on_kept(struct kept_group *k, const struct comm_spec *spec)
{
	CLEANUP(mem_free_ptr) unsigned char *all = mem_zalloc(spec->size, COMM_RENDEZVOUS_BYTES);
	unsigned char mine[COMM_RENDEZVOUS_BYTES] = { 0 };
	bool is_of_use = k->comm && k->size == spec->size && k->deadline_ms == spec->deadline_ms && comm_check(k->comm) == OK;
	struct offer offer = { is_of_use ? k->id : 0 }, other;

	NEED(all, "no memory to bring a group of %u together", spec->size);
	memcpy(mine, &offer, sizeof offer);
	TRY(group_meet(&k->meeting, mine, all));
	bool is_kept = is_of_use;
	for (uint32_t r = 0; r < spec->size; r++) {
		memcpy(&other, all + (size_t)r * COMM_RENDEZVOUS_BYTES, sizeof other);
		is_kept = is_kept && other.id == offer.id;
	}
	if (!is_kept) {
		comm_close(k->comm);
		k->comm = NULL;
	}
	return OK;
}

enum err group_join(struct job *j, const json_t *doc, uint32_t rank, uint32_t count, struct comm **out)
{
	json_int_t members = json_integer_value(json_object_get(doc, "members"));
	struct worker *w = j->worker;
	struct comm_spec spec;

	*out = NULL;
	if (members < 1 || members > count)
		return ERR(PROTOCOL, "a group of %jd members in a gang of %u", (intmax_t)members, count);
	if (rank >= (uint32_t)members)
		return OK;
	TRY(read_spec(j, doc, rank, (uint32_t)members, &spec));
	if (!w->group)
		w->group = mem_zalloc(1, sizeof *w->group);
	NEED(w->group, "no memory for a group");
	struct kept_group *k = w->group;
	k->meeting = (struct group_meeting){ .job = j, .size = spec.size, .deadline_ms = spec.deadline_ms };
	spec.user = &k->meeting;
	if (spec.inside != COMM_NCCL)
		return comm_open(&spec, out);
	TRY(gpu_open(w));
	spec.device = w->gpu;
	TRY(agree_on_kept(k, &spec));
	if (!k->comm) {
		TRY(comm_open(&spec, &k->comm));
		k->id = spec.group_id;
		k->size = spec.size;
		k->deadline_ms = spec.deadline_ms;
	}
	*out = k->comm;
	return OK;
}

void group_leave(struct worker *w, struct comm *c, bool is_whole)
{
	bool may_stay = c == w->group->comm;

	w->group->meeting.job = NULL;
	if (may_stay && is_whole)
		return;
	comm_close(c);
	if (may_stay)
		w->group->comm = NULL;
}

void group_close(struct worker *w)
{
	if (w->group)
		comm_close(w->group->comm);
	mem_free(w->group);
	w->group = NULL;
}
