/* nccl.c: see nccl.h. The library, opening and ending a group, waiting, and agreeing.
 *
 * Why a word from everybody before each collective: NCCL itself compares nothing. Members that call different things hang, or end with
 * wrong bytes; and one that fails by itself leaves the others to their deadline. The word costs a small all-gather.
 * Why non-blocking communicators: a blocking call of NCCL that waits for a dead peer never returns, and cannot be aborted. */
#include "comm/nccl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "base/mem.h"
#include "comm/nccl_impl.h"

enum { SPINS = 200, NAP_NS = 20000, LAST_WORD_MS = 500, REASON_MS = 100, LEAVE_MS = 1000, END_MS = 5000 };

_Static_assert(sizeof(struct nccl_word) == 256, "words are sent as they are");

/* ---- the library ---- */

static struct nccl_api api;
const struct nccl_api *const comm_nccl_api = &api;
static struct {
	bool tried;
	enum err state;
	struct err_info why;
	int version;
} library;

static FALLIBLE enum err load(void)
{
	void *lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
	const char *why = lib ? NULL : dlerror();

	if (!lib && why && strstr(why, "libnccl.so.2: cannot open shared object file: No such file"))
		return ERR(BACKEND_UNAVAILABLE, "libnccl.so.2 was not found: NCCL is not installed here");
	if (!lib)
		return ERR(BACKEND_UNAVAILABLE, "libnccl.so.2 cannot be loaded: %.300s", why ? why : "no reason given");
#define X(member, symbol, result, params)                                                              \
	if (!(*(void **)&api.member = dlsym(lib, #symbol)))                                            \
		return ERR(BACKEND_UNAVAILABLE, "libnccl.so.2 lacks " #symbol ": it is older than 2.14");
	NCCL_FUNCTIONS(X)
#undef X
	nccl_result r = api.get_version(&library.version);
	if (r != NCCL_OK)
		return ERR(BACKEND_UNAVAILABLE, "libnccl.so.2: ncclGetVersion: NCCL error %u", r);
	if (library.version < NCCL_OLDEST)
		return ERR(BACKEND_UNAVAILABLE, "libnccl.so.2 is of version %d: older than 2.14", library.version);
	if (library.version >= NCCL_NEXT_MAJOR)
		return ERR(BACKEND_UNAVAILABLE, "libnccl.so.2 is of version %d: another major version than NCCL 2, whose interface is "
			   "called here; install NCCL 2.14 or newer", library.version);
	return OK;
}

enum err comm_nccl_available(int *version_out)
{
	if (!library.tried) {
		library.tried = true;
		library.state = load();
		if (library.state)
			library.why = *err_last();
	} else if (library.state) {
		err_restore(&library.why);
	}
	if (version_out)
		*version_out = library.state ? 0 : library.version;
	return library.state;
}

bool comm_nccl_shares_gpus(void)
{
	const char *asked = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
	int version;

	return asked && strcmp(asked, "1") == 0 && comm_nccl_available(&version) == OK && version >= NCCL_SHARES_GPUS;
}

static enum err failed(struct comm *c, nccl_result r, const char *call)
{
	const char *last = api.last_error(nccl_of(c)->comm) ?: "no more is said";
	const char *text = api.error_string(r) ?: "NCCL has no text for it";

	if (r == NCCL_REMOTE_ERROR)
		return ERR(PEER_LOST, "%s: %s: %.300s", call, text, last);
	return ERR(DEVICE_FAILED, "%s: %s (NCCL error %u): %.300s", call, text, r, last);
}

/* ---- waiting ---- */

static void pause_a_little(uint32_t turn)
{
	if (turn < SPINS)
		sched_yield();
	else
		nanosleep(&(struct timespec){ .tv_nsec = NAP_NS }, NULL);
}

static FALLIBLE enum err check_deadline(struct comm *c, const char *what)
{
	bool late;

	TRY(comm_wait(c, &late));
	if (late)
		return ERR(PEER_TIMEOUT, "a member of the NCCL group did not come in time: %s", what);
	return OK;
}

/* NCCL says that a member is gone, not why. The coordinator may know, and tells each member in its tick: it is given a moment. */
static FALLIBLE enum err lost(struct comm *c, nccl_result r, const char *call)
{
	uint64_t end = comm_now_ns() + (uint64_t)REASON_MS * 1000000;
	bool late = false;

	while (r == NCCL_REMOTE_ERROR && c->root->spec.tick && comm_now_ns() < end) {
		TRY(comm_wait(c, &late));
		nanosleep(&(struct timespec){ .tv_nsec = REASON_MS * 1000000 / 20 }, NULL);
	}
	return failed(c, r, call);
}

/* The state of the group's calls so far. If NCCL does not tell it, *call becomes the question itself. */
static nccl_result state_of(const struct nccl *g, const char **call)
{
	nccl_result state = NCCL_OK, asked = api.async_error(g->comm, &state);

	if (asked == NCCL_OK)
		return state;
	*call = "ncclCommGetAsyncError";
	return asked;
}

enum err comm_nccl_called(struct comm *c, nccl_result r, const char *call)
{
	for (uint32_t turn = 0; r == NCCL_IN_PROGRESS; turn++) {
		r = state_of(nccl_of(c), &call);
		if (r != NCCL_IN_PROGRESS)
			break;
		TRY(check_deadline(c, call));
		pause_a_little(turn);
	}
	return r == NCCL_OK ? OK : lost(c, r, call);
}

void comm_nccl_group_begin(struct nccl_group *p)
{
	*p = (struct nccl_group){ .r = api.group_start(), .call = "ncclGroupStart" };
	p->begun = comm_nccl_taken(p->r);
}

void comm_nccl_group_add(struct nccl_group *p, nccl_result r, const char *call)
{
	if (comm_nccl_taken(p->r))
		*p = (struct nccl_group){ r, call, p->begun };
}

enum err comm_nccl_group_end(struct comm *c, struct nccl_group *p)
{
	nccl_result end = p->begun ? api.group_end() : NCCL_OK; /* also after an error: calls of this thread are held back until then */

	comm_nccl_group_add(p, end, "ncclGroupEnd");
	return comm_nccl_called(c, p->r, p->call);
}

enum err comm_nccl_wait(struct comm *c, int mark)
{
	struct nccl *g = nccl_of(c);
	bool done = false;

	for (uint32_t turn = 0;; turn++) {
		const char *call = "a collective";
		TRY(mark < 0 ? device_done(g->device, &done) : device_mark_done(g->device, (uint32_t)mark, &done));
		if (done)
			break;
		nccl_result r = state_of(g, &call);
		if (!comm_nccl_taken(r))
			return lost(c, r, call);
		TRY(check_deadline(c, call));
		pause_a_little(turn);
	}
	g->busy = g->busy && mark >= 0;
	return OK;
}

struct CUstream_st *comm_nccl_stream(const struct comm *c)
{
	return device_stream(nccl_of(c)->device);
}

/* ---- agreeing ---- */

static void fill_word(struct comm *c, struct nccl_word *w, enum err status)
{
	const struct err_info *i = err_last();

	memset(w, 0, sizeof *w);
	w->call = c->call;
	w->rank = -1;
	if (!status)
		return;
	w->code = status;
	w->rank = i->rank >= 0 ? i->rank : (int64_t)c->names[c->rank];
	snprintf(w->text, sizeof w->text, "%.*s", (int)sizeof w->text - 1, i->text);
}

static enum err told(struct comm *c, uint32_t member, struct nccl_word *w)
{
	enum err code = w->code < ERR_COUNT ? (enum err)w->code : ERR_COMM_PROTOCOL;

	w->text[sizeof w->text - 1] = '\0';
	nccl_of(c)->agreed = true;
	if (member != c->rank) /* one's own error is told in full here */
		err_record(code, 0, ERR_PLACE, "%s", w->text);
	return w->rank >= 0 ? err_at_rank(code, w->rank) : comm_at(c, code, member);
}

/* The first member that differs from member 0 is blamed, by all alike. */
static FALLIBLE enum err compare(struct comm *c, struct nccl_word *all)
{
	for (uint32_t r = 0; r < c->size; r++)
		if (all[r].code)
			return told(c, r, &all[r]);
	for (uint32_t r = 1; r < c->size; r++) {
		if (comm_call_same(&all[r].call, &all[0].call))
			continue;
		nccl_of(c)->agreed = true;
		enum err e = comm_mismatch(c, r == c->rank ? 0 : r, &all[r == c->rank ? 0 : r].call);
		struct err_info info = *err_last();
		info.rank = c->names[r];
		err_restore(&info);
		return e;
	}
	return OK;
}

static FALLIBLE enum err exchange_words(struct comm *c, enum err status)
{
	struct nccl *g = nccl_of(c);
	struct nccl_word *mine = g->words, *all = g->words + 1;
	size_t n = sizeof *mine;
	struct err_info info = *err_last();

	fill_word(c, mine, status);
	TRY(device_enter(g->device));
	g->busy = true;
	TRY(device_copy(g->device, g->device_words, mine, n, DEVICE_PUT));
	TRY(comm_nccl_called(c, api.all_gather(g->device_words, (char *)g->device_words + n, n, NCCL_UINT8, g->comm, comm_nccl_stream(c)),
			     "ncclAllGather"));
	TRY(device_copy(g->device, all, (char *)g->device_words + n, n * c->size, DEVICE_GET));
	TRY(comm_nccl_wait(c, NCCL_WAIT_ALL));
	if (status)
		err_restore(&info);
	return compare(c, all);
}

enum err comm_nccl_agree(struct comm *c, enum err status)
{
	if (!nccl_of(c)->comm)
		return ERR(PEER_LOST, "the NCCL group was aborted");
	return exchange_words(c, status);
}

/* ---- opening ---- */

struct introduction {
	uint32_t code, spare;
	char text[NCCL_TEXT_MAX];
	char gpu[DEVICE_UUID_MAX];
	ncclUniqueId id;
};
_Static_assert(sizeof(struct introduction) <= COMM_RENDEZVOUS_BYTES, "an introduction fits what members tell each other");

static void *new_words(struct nccl *g, uint32_t size)
{
	size_t n = (1 + (size_t)size) * sizeof *g->words;

	g->size = size;
	g->words = mem_zalloc(1, n);
	if (g->words && device_pin(g->device, g->words, n) == OK)
		g->words_pinned = true; /* else it works as well, a little slower */
	return g->words;
}

static bool is_stuck;                  /* a group of this process does not end */

/* Beside a group that does not end, nothing is freed: the driver would wait for its kernels. */
static void free_group(struct nccl *g)
{
	if (!g || is_stuck)
		return;
	comm_nccl_free_slots(g);
	if (g->words_pinned && device_unpin(g->device, g->words) != OK)
		g->words_pinned = false;
	device_free(g->device, g->device_words);
	mem_free(g->words);
	mem_free(g);
}

static FALLIBLE enum err new_group(struct comm *c, struct device *d)
{
	struct nccl *g = mem_zalloc(1, sizeof *g);

	NEED(g, "no memory for an NCCL group");
	g->device = d;
	c->impl = g;
	if (!new_words(g, c->size))
		return ERR(NO_MEMORY, "no memory for an NCCL group of %u", c->size);
	return device_alloc(d, (1 + (uint64_t)c->size) * sizeof *g->words, &g->device_words);
}

static FALLIBLE enum err join(struct comm *c, const ncclUniqueId *id)
{
	ncclConfig_t how = { .size = sizeof how, .magic = (unsigned)NCCL_CONFIG_MAGIC, .version = NCCL_OLDEST };
	struct nccl *g = nccl_of(c);

	TRY(device_enter(g->device));
	nccl_result r = api.init(&g->comm, (int)c->size, *id, (int)c->rank, &how);
	if (!comm_nccl_taken(r))
		return failed(c, r, "ncclCommInitRankConfig");
	return comm_nccl_called(c, r, "ncclCommInitRankConfig");
}

/* A call that ends a communicator, on a thread of its own: NCCL waits in it for its own threads and the driver, without a deadline. */
struct ending {
	nccl_result (*call)(struct ncclComm *comm);
	struct ncclComm *comm;
	_Atomic bool done;
	_Atomic int users;             /* the thread, and who waits for it: the last one frees it */
};

static void release(struct ending *e)
{
	if (atomic_fetch_sub(&e->users, 1) == 1)
		mem_free(e);
}

static void *run_ending(void *arg)
{
	struct ending *e = arg;

	(void)e->call(e->comm); /* there is nothing left to be told */
	atomic_store(&e->done, true);
	release(e);
	return NULL;
}

bool comm_nccl_stuck(void)
{
	return is_stuck;
}

/* Ends the group's communicator. After END_MS it is left to the process's end, with all memory that NCCL may still use. */
static void end_comm(struct nccl *g, nccl_result (*call)(struct ncclComm *comm), const char *name)
{
	struct ending *e = mem_zalloc(1, sizeof *e);
	uint64_t end = comm_now_ns() + (uint64_t)END_MS * 1000000;
	pthread_t thread;

	if (e)
		*e = (struct ending){ .call = call, .comm = g->comm, .users = 2 };
	if (!e || pthread_create(&thread, NULL, run_ending, e) != 0) {
		mem_free(e);
		(void)call(g->comm);
		g->comm = NULL;
		return;
	}
	pthread_detach(thread);
	g->comm = NULL;
	for (uint32_t turn = 0; !atomic_load(&e->done) && comm_now_ns() < end; turn++)
		pause_a_little(turn);
	if (!atomic_load(&e->done)) {
		is_stuck = true;
		err_record(ERR_TIMED_OUT, 0, ERR_PLACE, "%s has not returned for %d s", name, END_MS / 1000);
		log_err("a group over NCCL does not end: this process will", NULL);
	}
	release(e);
}

static void abort_one(struct nccl *g)
{
	if (g->comm && device_enter(g->device) == OK)
		end_comm(g, api.abort, "ncclCommAbort");
	g->comm = NULL;
	if (g->busy && device_wait(g->device, LEAVE_MS) == OK)
		g->busy = false;
}

static void drop(struct comm *c)
{
	struct err_info info = *err_last();

	if (c->impl) {
		abort_one(c->impl);
		free_group(c->impl);
	}
	c->impl = NULL;
	err_restore(&info);
}

static FALLIBLE enum err new_id(struct comm *c, ncclUniqueId *out)
{
	nccl_result r = api.get_id(out);

	return r == NCCL_OK ? OK : failed(c, r, "ncclGetUniqueId");
}

static FALLIBLE enum err prepare(struct comm *c, const struct comm_spec *spec, struct introduction *mine)
{
	struct device_info info;

	TRY(comm_nccl_available(NULL));
	if (is_stuck)
		return ERR(DEVICE_FAILED, "a group over NCCL of this process has not ended: it opens no other");
	if (!spec->device || device_is_cpu(spec->device))
		return ERR(BACKEND_UNAVAILABLE, "an NCCL group needs a GPU, and this member has none");
	TRY(new_group(c, spec->device));
	TRY(device_cuda_info((uint32_t)device_index(spec->device), &info));
	memcpy(mine->gpu, info.uuid, sizeof mine->gpu);
	return c->rank == 0 ? new_id(c, &mine->id) : OK;
}

static void read_introduction(const unsigned char *all, uint32_t r, struct introduction *out)
{
	memcpy(out, all + (size_t)r * COMM_RENDEZVOUS_BYTES, sizeof *out);
	out->text[sizeof out->text - 1] = out->gpu[sizeof out->gpu - 1] = '\0';
}

/* Refuses two members on one GPU: NCCL itself says "invalid usage" and no more, after seconds of start. */
static FALLIBLE enum err check_gpus(const struct comm *c, const unsigned char *all)
{
	struct introduction a, b;

	for (uint32_t r = 1; r < c->size && !comm_nccl_shares_gpus(); r++) {
		read_introduction(all, r, &b);
		for (uint32_t k = 0; k < r; k++) {
			read_introduction(all, k, &a);
			if (strcmp(a.gpu, b.gpu) != 0)
				continue;
			enum err e = ERR(BACKEND_UNAVAILABLE, "ranks %u and %u are both on %s: NCCL takes one member a GPU (NCCL 2.30 "
					 "takes more with NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment)", c->names[k],
					 c->names[r], b.gpu);
			return comm_at(c, e, r);
		}
	}
	return OK;
}

/* Everybody's reason, or the group's id. All name the same member that could not prepare. */
static FALLIBLE enum err introduce(struct comm *c, const struct comm_spec *spec, struct introduction *mine)
{
	CLEANUP(mem_free_ptr) unsigned char *all = mem_zalloc(c->size, COMM_RENDEZVOUS_BYTES);
	unsigned char blob[COMM_RENDEZVOUS_BYTES] = { 0 };

	NEED(all, "no memory to open a group of %u", c->size);
	memcpy(blob, mine, sizeof *mine);
	if (spec->meet)
		TRY(spec->meet(spec->user, blob, all));
	else
		memcpy(all, blob, sizeof blob);
	for (uint32_t r = 0; r < c->size; r++) {
		struct introduction other;
		read_introduction(all, r, &other);
		if (other.code) {
			enum err e = other.code < ERR_COUNT ? (enum err)other.code : ERR_COMM_PROTOCOL;
			err_record(e, 0, ERR_PLACE, "rank %u: %s", c->names[r], other.text);
			return comm_at(c, e, r);
		}
		if (r == 0)
			mine->id = other.id;
	}
	return check_gpus(c, all);
}

static enum err nccl_open(struct comm *c, const struct comm_spec *spec)
{
	struct introduction mine = { 0 };

	c->impl = NULL;
	enum err e = prepare(c, spec, &mine);
	if (e) {
		mine.code = e;
		snprintf(mine.text, sizeof mine.text, "%.*s", (int)sizeof mine.text - 1, err_last()->text);
	}
	e = introduce(c, spec, &mine);
	e = e ?: join(c, &mine.id);
	if (e)
		drop(c);
	return e;
}

/* ---- subgroups ---- */

/* The first of them makes the id and sends it through the parent: the other members of the parent do not take part. */
static FALLIBLE enum err send_id(struct comm *parent, const uint32_t *ranks, uint32_t count, struct comm *sub, struct nccl_word *word)
{
	struct nccl *g = nccl_of(parent);
	struct CUstream_st *s = comm_nccl_stream(parent);
	size_t n = sizeof *word;
	struct nccl_group p;

	parent->deadline_ns = sub->deadline_ns;
	g->busy = true;
	TRY(device_copy(g->device, g->device_words, word, n, DEVICE_PUT));
	comm_nccl_group_begin(&p);
	for (uint32_t i = 1; sub->rank == 0 && i < count && comm_nccl_taken(p.r); i++)
		comm_nccl_group_add(&p, api.send(g->device_words, n, NCCL_UINT8, (int)ranks[i], g->comm, s), "ncclSend");
	if (sub->rank != 0 && comm_nccl_taken(p.r))
		comm_nccl_group_add(&p, api.recv(g->device_words, n, NCCL_UINT8, (int)ranks[0], g->comm, s), "ncclRecv");
	TRY(comm_nccl_group_end(parent, &p));
	TRY(device_copy(g->device, word, g->device_words, n, DEVICE_GET));
	return comm_nccl_wait(parent, NCCL_WAIT_ALL);
}

static FALLIBLE enum err make_subgroup(struct comm *parent, const uint32_t *ranks, uint32_t count, struct comm *sub)
{
	struct nccl_word word = { .call = sub->call };
	ncclUniqueId id = { 0 };

	_Static_assert(sizeof word.text >= sizeof id, "an id fits a word");
	TRY(new_group(sub, nccl_of(parent)->device));
	enum err e = sub->rank == 0 ? new_id(sub, &id) : OK;
	struct err_info why = *err_last();
	word.code = e;
	memcpy(word.text, &id, sizeof id);
	TRY(device_enter(nccl_of(parent)->device));
	if (count > 1)
		TRY(send_id(parent, ranks, count, sub, &word));
	if (e)
		err_restore(&why);
	if (word.code)
		return e ?: ERR(DEVICE_FAILED, "the first member of the subgroup has no id for it");
	if (!comm_call_same(&word.call, &sub->call))
		return comm_mismatch(sub, 0, &word.call);
	memcpy(&id, word.text, sizeof id);
	return join(sub, &id);
}

static enum err nccl_split(struct comm *parent, const uint32_t *ranks, uint32_t count, struct comm *sub)
{
	if (!nccl_of(parent)->comm)
		return ERR(PEER_LOST, "the NCCL group was aborted");
	enum err e = make_subgroup(parent, ranks, count, sub);
	if (e) {
		drop(sub);
		return e;
	}
	struct nccl *root = nccl_of(sub->root), *g = nccl_of(sub);
	g->next = root->next;
	root->next = g;
	return OK;
}

/* ---- ending ---- */

/* Leaving in order waits until the others have what we sent; a group that will not end so is aborted. */
static void leave(struct nccl *g)
{
	uint64_t end = comm_now_ns() + (uint64_t)LEAVE_MS * 1000000;

	if (!g->comm || g->busy || device_enter(g->device) != OK) {
		abort_one(g);
		return;
	}
	nccl_result r = api.finalize(g->comm);
	for (uint32_t turn = 0; r == NCCL_IN_PROGRESS && comm_now_ns() < end; turn++) {
		if (api.async_error(g->comm, &r) != NCCL_OK)
			break;
		pause_a_little(turn);
	}
	if (r != NCCL_OK) {
		abort_one(g);
		return;
	}
	end_comm(g, api.destroy, "ncclCommDestroy");
}

static void nccl_close(struct comm *c)
{
	struct nccl *g = nccl_of(c);

	if (c->root != c)
		for (struct nccl *at = nccl_of(c->root); at; at = at->next)
			if (at->next == g)
				at->next = g->next;
	leave(g);
	free_group(g);
	c->impl = NULL;
}

/* Our last word goes where the others wait for the first one of their next collective. If they are elsewhere they hear it from NCCL. */
static void nccl_abort(struct comm *c, struct err_info *f)
{
	struct nccl *g = nccl_of(c);

	if (g->comm && !g->busy && !g->agreed && c->size > 1) {
		comm_tick_fn tick = c->spec.tick;
		c->spec.tick = NULL;
		c->deadline_ns = comm_now_ns() + (uint64_t)LAST_WORD_MS * 1000000;
		err_restore(f);
		(void)!exchange_words(c, f->code);
		if (g->agreed && err_last()->rank != f->rank)
			*f = *err_last(); /* a member before us failed by itself as well: its word counts for all */
		c->spec.tick = tick;
	}
	/* An error that all know of came in a collective that all ended: they may still be reading our word. */
	for (struct nccl *at = g; at; at = at->next) {
		if (at->agreed)
			leave(at);
		abort_one(at);
	}
}

static enum err nccl_poll(struct comm *c)
{
	const char *call = "between collectives";

	if (!nccl_of(c)->comm)
		return ERR(PEER_LOST, "the NCCL group was aborted");
	nccl_result r = state_of(nccl_of(c), &call);
	return comm_nccl_taken(r) ? OK : failed(c, r, call);
}

const struct comm_ops *comm_nccl_host_ops(void)
{
	static const struct comm_ops ops = {
		.name = "nccl", .open = nccl_open, .split = nccl_split, .close = nccl_close, .abort = nccl_abort, .poll = nccl_poll,
		.barrier = comm_nccl_barrier, .broadcast = comm_nccl_host_broadcast, .all_gather_v = comm_nccl_host_all_gather_v,
		.exchange = comm_nccl_exchange,
	};

	return &ops;
}

const struct comm_ops *comm_nccl_ops(void)
{
	static const struct comm_ops ops = {
		.name = "nccl", .open = nccl_open, .split = nccl_split, .close = nccl_close, .abort = nccl_abort, .poll = nccl_poll,
		.barrier = comm_nccl_barrier, .broadcast = comm_nccl_broadcast, .all_gather_v = comm_nccl_all_gather_v,
		.exchange = comm_nccl_exchange, .gather = comm_nccl_gather, .scatter = comm_nccl_scatter, .reduce = comm_nccl_reduce,
		.all_reduce = comm_nccl_all_reduce, .reduce_scatter = comm_nccl_reduce_scatter,
	};

	return &ops;
}
