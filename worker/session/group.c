/* group.c: see group.h. */
#include "session/group.h"

#include "base/buf.h"
#include "session/gpu.h"

enum { KEPT_MAX = 4 };

struct kept_group {
	struct comm *comm;             /* the NCCL group; NULL: this worker is no member, or has none for now */
	uint64_t id;                   /* the group's id, the same on all members */
	uint64_t used;                 /* number of the job that used it last */
	uint32_t size, deadline_ms;    /* size 0: the entry is free */
};

/* Every worker of the gang, member or not, has the same sizes here, whatever became of the jobs: what all members do together when a group
 * gives way (ncclCommDestroy), they do before the same job. */
struct kept_groups {
	struct kept_group v[KEPT_MAX]; /* at most one of a size: its members are the gang's first ones */
	uint64_t jobs;                 /* over NCCL, so far */
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

static void close_kept(struct kept_group *k)
{
	comm_close(k->comm);
	k->comm = NULL;
	k->id = 0;
}

/* The entry of this size, for the next job. The group that was not used for the longest gives way. */
static struct kept_group *entry_of(struct kept_groups *all, uint32_t size)
{
	struct kept_group *k = &all->v[0];

	for (uint32_t i = 0; i < KEPT_MAX && k->size != size; i++)
		if (all->v[i].size == size || all->v[i].used < k->used)
			k = &all->v[i];
	if (k->size != size)
		close_kept(k);
	k->size = size;
	k->used = ++all->jobs;
	return k;
}

/* If one member has no group, or its group has failed, all members open a new one, and those that kept the old one close it. */
static FALLIBLE enum err agree_on_kept(struct kept_group *k, struct group_meeting *meeting, const struct comm_spec *spec)
{
	CLEANUP(mem_free_ptr) unsigned char *all = mem_zalloc(spec->size, COMM_RENDEZVOUS_BYTES);
	unsigned char mine[COMM_RENDEZVOUS_BYTES] = { 0 };
	bool is_of_use = k->comm && k->deadline_ms == spec->deadline_ms && comm_check(k->comm) == OK;
	struct offer offer = { is_of_use ? k->id : 0 }, other;

	NEED(all, "no memory to bring a group of %u together", spec->size);
	memcpy(mine, &offer, sizeof offer);
	TRY(group_meet(meeting, mine, all));
	bool is_kept = is_of_use;
	for (uint32_t r = 0; r < spec->size; r++) {
		memcpy(&other, all + (size_t)r * COMM_RENDEZVOUS_BYTES, sizeof other);
		is_kept = is_kept && other.id == offer.id;
	}
	if (!is_kept)
		close_kept(k);
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
	TRY(read_spec(j, doc, rank, (uint32_t)members, &spec));
	if (!w->groups)
		w->groups = mem_zalloc(1, sizeof *w->groups);
	NEED(w->groups, "no memory for a group");
	struct kept_group *k = spec.inside == COMM_NCCL ? entry_of(w->groups, spec.size) : NULL;
	if (rank >= spec.size)
		return OK;
	struct group_meeting *meeting = &w->groups->meeting;
	*meeting = (struct group_meeting){ .job = j, .size = spec.size, .deadline_ms = spec.deadline_ms };
	spec.user = meeting;
	if (!k)
		return comm_open(&spec, out);
	TRY(gpu_open(w));
	spec.device = w->gpu;
	TRY(agree_on_kept(k, meeting, &spec));
	if (!k->comm) {
		TRY(comm_open(&spec, &k->comm));
		k->id = spec.group_id;
		k->deadline_ms = spec.deadline_ms;
	}
	*out = k->comm;
	return OK;
}

void group_leave(struct worker *w, struct comm *c, bool is_whole)
{
	struct kept_group *kept = NULL;

	w->groups->meeting.job = NULL;
	for (uint32_t i = 0; i < KEPT_MAX; i++)
		if (w->groups->v[i].comm == c)
			kept = &w->groups->v[i];
	if (!kept)
		comm_close(c);
	else if (!is_whole)
		close_kept(kept);
}

void group_close(struct worker *w)
{
	for (uint32_t i = 0; w->groups && i < KEPT_MAX; i++)
		close_kept(&w->groups->v[i]);
	mem_free(w->groups);
	w->groups = NULL;
}
