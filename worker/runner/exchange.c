/* exchange.c: see exchange.h. */
#include "runner/exchange.h"

#include "base/num.h"
#include "comm/nccl.h"
#include "device/device.h"
#include "runner/fold.h"
#include "runner/move.h"
#include "session/group.h"

enum {
	WINDOW_MESSAGES = 1024,
	WINDOW_LOCAL_BYTES = 256 << 20,        /* copied by members while others may wait: far less than a deadline */
	WINDOW_FOLD_BYTES = 8 << 20,
};

struct piece {
	uint64_t move, dims_at;
	uint64_t fold_at;              /* in the fold buffer; UINT64_MAX: goes to its place */
};

struct fold_piece {
	uint64_t move, dims_at, at, bytes;
	uint32_t parts;
};

struct exchanging {
	const struct exec_spec *spec;
	struct run *run;
	struct comm *comm;
	struct files files;
	uint32_t me, members;
	struct vec(struct comm_message) messages;
	struct vec(struct piece) pieces;
	struct vec(struct fold_piece) folds;
	struct vec(int64_t) dims;
	unsigned char *fold, *other;   /* parts of reductions; the own side of a comparison */
	uint64_t fold_used, local_bytes;
	bool failed, mine;             /* the group failed; because of this member */
	/* what runs guarded */
	const struct run_move *move;
	const int64_t *off, *size;
	void *out;
	const void *in;
	enum err result;
	struct stats_diff diff;
};

static bool compares(const struct exchanging *x)
{
	return x->run->head->opts.mode == RUN_COMPARE_BOXES;
}

static uint32_t to_rank(const struct exchanging *x, const struct run_move *m)
{
	return compares(x) ? x->run->srcs[m->dst].rank : x->run->dsts[m->dst].rank;
}

static uint32_t from_member(const struct exchanging *x, const struct run_move *m)
{
	return x->run->srcs[m->src].rank % x->members;
}

static uint32_t to_member(const struct exchanging *x, const struct run_move *m)
{
	return to_rank(x, m) % x->members;
}

/* ----------------------------------------------------------------------------------------------------- one piece */

static void pack_guarded(void *user)
{
	struct exchanging *x = user;

	move_pack(&x->files, x->run, x->move->src, x->off, x->size, x->out);
}

static void unpack_guarded(void *user)
{
	struct exchanging *x = user;

	x->result = move_unpack(&x->files, x->run, x->move->dst, (enum dtype)x->run->srcs[x->move->src].dtype, x->off, x->size, x->in);
}

static void copy_guarded(void *user)
{
	struct exchanging *x = user;

	x->result = move_copy(&x->files, x->run, x->move, x->off, x->size);
}

static void compare_guarded(void *user)
{
	struct exchanging *x = user;
	const struct run_src *s = &x->run->srcs[x->move->src];

	move_pack(&x->files, x->run, x->move->dst, x->off, x->size, x->other);
	x->diff = (struct stats_diff){ 0 };
	stats_compare((enum dtype)s->dtype, x->in, x->other, box_volume(s->ndim, x->size), &x->run->head->opts.near, 0, &x->diff);
}

static FALLIBLE enum err guarded(struct exchanging *x, void (*fn)(void *user))
{
	x->result = OK;
	enum err e = seg_guard(fn, x);
	e = e ?: x->result;
	x->mine = x->mine || e;
	return e ? move_error(&x->files, x->run, x->move, e) : OK;
}

static void point_at(struct exchanging *x, uint64_t move, uint64_t dims_at)
{
	x->move = &x->run->moves[move];
	x->off = x->dims.v + dims_at;
	x->size = x->off + x->run->srcs[x->move->src].ndim;
}

static uint64_t piece_bytes(const struct exchanging *x)
{
	const struct run_src *s = &x->run->srcs[x->move->src];

	return box_volume(s->ndim, x->size) * dtype_bytes((enum dtype)s->dtype);
}

static void count_done(struct exchanging *x, uint64_t bytes)
{
	uint32_t rank = to_rank(x, x->move), low = 0, high = (uint32_t)x->run->ranks_n;

	while (low + 1 < high) {
		uint32_t mid = (low + high) / 2;
		if (x->run->ranks[mid].rank <= rank)
			low = mid;
		else
			high = mid;
	}
	atomic_fetch_add(&x->run->ranks[low].bytes_done, bytes);
	if (x->run->srcs[x->move->src].rank != rank)
		atomic_fetch_add(&x->run->head->moved_bytes, bytes);
}

static void note_difference(struct exchanging *x)
{
	struct run_src *s = &x->run->srcs[x->move->src];

	if (!x->diff.count)
		return;
	x->diff.first = move_shard_element(x->run, x->move->src, x->off, x->size, x->diff.first);
	run_note_difference(s, &x->diff);
}

static enum err pack(void *user, uint64_t index, void *out)
{
	struct exchanging *x = user;

	point_at(x, x->pieces.v[index].move, x->pieces.v[index].dims_at);
	x->out = out;
	move_populate(&x->files, x->run, x->move, x->off, x->size, true, false);
	return guarded(x, pack_guarded);
}

static enum err unpack(void *user, uint64_t index, const void *in)
{
	struct exchanging *x = user;
	const struct piece *p = &x->pieces.v[index];

	point_at(x, p->move, p->dims_at);
	x->in = in;
	count_done(x, piece_bytes(x));
	if (p->fold_at != UINT64_MAX) {
		memcpy(x->fold + p->fold_at, in, piece_bytes(x));
		return OK;
	}
	move_populate(&x->files, x->run, x->move, x->off, x->size, false, true);
	if (!compares(x))
		return guarded(x, unpack_guarded);
	TRY(guarded(x, compare_guarded));
	note_difference(x);
	return OK;
}

/* ------------------------------------------------------------------------------------------------------ windows */

static FALLIBLE enum err fold_all(struct exchanging *x)
{
	each(f, x->folds.v, x->folds.n) {
		point_at(x, f->move, f->dims_at);
		if (to_member(x, x->move) != x->me)
			continue;
		const struct run_src *s = &x->run->srcs[x->move->src];
		TRY(fold_parts(x->fold + f->at, f->bytes, f->parts, box_volume(s->ndim, x->size), (enum dtype)s->dtype, x->move));
		x->in = x->fold + f->at;
		TRY(guarded(x, unpack_guarded));
	}
	return OK;
}

static FALLIBLE enum err flush(struct exchanging *x)
{
	struct comm_exchange all = { x->messages.v, x->messages.n, pack, unpack, x };

	x->mine = false;
	enum err e = x->messages.n ? comm_exchange(x->comm, &all) : comm_barrier(x->comm);
	x->failed = e != OK;
	x->mine = x->mine || err_last()->rank == x->me;
	TRY(e);
	TRY(fold_all(x));
	x->messages.n = x->pieces.n = x->folds.n = x->dims.n = 0;
	x->fold_used = x->local_bytes = 0;
	return OK;
}

static FALLIBLE enum err keep_dims(struct exchanging *x, const int64_t *dims, uint32_t ndim, uint64_t *at_out)
{
	TRY(vec_reserve(&x->dims, 2ull * ndim + 1));
	*at_out = x->dims.n;
	memcpy(x->dims.v + x->dims.n, dims, 2ull * ndim * sizeof *dims);
	x->dims.n += 2ull * ndim;
	return OK;
}

static FALLIBLE enum err add_message(struct exchanging *x, uint64_t move, uint64_t dims_at, uint64_t bytes, uint64_t fold_at)
{
	const struct run_move *m = &x->run->moves[move];
	struct comm_message *message;
	struct piece *piece;

	TRY(vec_push(&x->messages, &message));
	*message = (struct comm_message){ from_member(x, m), to_member(x, m), (uint32_t)bytes };
	TRY(vec_push(&x->pieces, &piece));
	*piece = (struct piece){ move, dims_at, fold_at };
	if (message->from == x->me)
		TRY(move_map(&x->files, x->run, m, true, false));
	if (message->to != x->me)
		return OK;
	unsigned char *p;
	return compares(x) ? files_segment(&x->files, x->run->srcs[m->dst].file, &p) : move_map(&x->files, x->run, m, false, true);
}

/* Both ends are one member's. */
static FALLIBLE enum err copy_local(struct exchanging *x, uint64_t move)
{
	const struct run_move *m = &x->run->moves[move];
	const struct run_src *s = &x->run->srcs[m->src];
	int64_t dims[2 * NDIM_MAX + 1];
	struct move_cut cut;

	x->local_bytes += move_bytes(x->run, m);
	if (from_member(x, m) == x->me) {
		TRY(move_map(&x->files, x->run, m, true, true));
		move_cut_begin(&cut, s->ndim, x->run->dims + m->dims_at, num_max(MOVE_PIECE_BYTES / dtype_bytes((enum dtype)s->dtype), 1));
		while (move_cut_next(&cut, dims, dims + s->ndim)) {
			x->move = m;
			x->off = dims;
			x->size = dims + s->ndim;
			move_populate(&x->files, x->run, x->move, x->off, x->size, true, true);
			TRY(guarded(x, copy_guarded));
			count_done(x, piece_bytes(x));
			TRY(x->spec->tick(x->spec->user));
		}
	}
	return x->local_bytes > WINDOW_LOCAL_BYTES ? flush(x) : OK;
}

/* `parts` moves of one box: the pieces of all of them, piece by piece. */
static FALLIBLE enum err add_moves(struct exchanging *x, uint64_t first, uint32_t parts)
{
	const struct run_move *m = &x->run->moves[first];
	const struct run_src *s = &x->run->srcs[m->src];
	uint32_t item = dtype_bytes((enum dtype)s->dtype);
	uint64_t most = COMM_BLOCK_MAX / item, dims_at;
	int64_t dims[2 * NDIM_MAX + 1];
	struct move_cut cut;

	if (m->reduce)
		most = num_min(most, fold_elements((enum dtype)s->dtype, parts));
	move_cut_begin(&cut, s->ndim, x->run->dims + m->dims_at, most);
	while (move_cut_next(&cut, dims, dims + s->ndim)) {
		uint64_t bytes = box_volume(s->ndim, dims + s->ndim) * item, fold = m->reduce ? bytes * parts : 0;
		if (x->messages.n + parts > WINDOW_MESSAGES || x->fold_used + fold > WINDOW_FOLD_BYTES)
			TRY(flush(x));
		TRY(keep_dims(x, dims, s->ndim, &dims_at));
		for (uint32_t i = 0; i < parts; i++)
			TRY(add_message(x, first + i, dims_at, bytes, m->reduce ? x->fold_used + i * bytes : UINT64_MAX));
		struct fold_piece *piece;
		if (m->reduce) {
			TRY(vec_push(&x->folds, &piece));
			*piece = (struct fold_piece){ first, dims_at, x->fold_used, bytes, parts };
		}
		x->fold_used += fold;
	}
	return OK;
}

static FALLIBLE enum err walk(struct exchanging *x)
{
	const struct run *run = x->run;

	for (uint64_t i = 0; i < run->moves_n;) {
		const struct run_move *m = &run->moves[i];
		uint32_t parts = 1;
		while (m->reduce && i + parts < run->moves_n && m[parts].reduce == m->reduce)
			parts++;
		bool local = !m->reduce && !compares(x) && from_member(x, m) == to_member(x, m);
		enum err e = local ? copy_local(x, i) : add_moves(x, i, parts);
		if (e)
			return x->failed || e == ERR_CANCELLED ? e : move_error(&x->files, run, m, e);
		i += parts;
	}
	return flush(x);
}

enum err exchange_run(const struct exec_spec *spec, struct comm *c)
{
	struct exchanging x = { .spec = spec, .run = spec->run, .comm = c, .me = comm_rank(c), .members = comm_size(c) };

	enum err e = files_open(spec->run, spec->stores, spec->fds, spec->fd_count, &x.files);
	x.fold = e ? NULL : mem_alloc(WINDOW_FOLD_BYTES);
	x.other = e ? NULL : mem_alloc(COMM_BLOCK_MAX);
	if (!e && (!x.fold || !x.other))
		e = ERR(NO_MEMORY, "no memory for an exchange");
	e = e ?: walk(&x);
	if (e)
		comm_abort(c, e);
	/* who only heard of it says no more than that it stopped: the one it happened to knows the rank and the FQN */
	if (e && x.failed && !x.mine && err_blast(e) != ERR_BLAST_GANG)
		e = ERR(CANCELLED, "another member of the group failed");
	files_close(&x.files);
	vec_free(&x.messages);
	vec_free(&x.pieces);
	vec_free(&x.folds);
	vec_free(&x.dims);
	mem_free(x.fold);
	mem_free(x.other);
	return e;
}

/* -------------------------------------------------------------------------------------------------------- groups */

enum err exchange_choose(struct job *j)
{
	/* `device` says no more: segments are host memory, whatever their bytes pass through, and on one host shm is the shortest way */
	j->backend = j->spec.backend == OP_BACKEND_TCP ? COMM_TCP : j->spec.backend == OP_BACKEND_NCCL ? COMM_NCCL : COMM_SHM;
	json_object_set_new(j->result, "backend", json_string(comm_backend_name(j->backend)));
	if (j->backend == COMM_SHM || j->dry_run)
		return OK;
	if (j->backend == COMM_NCCL && j->worker->device)
		TRY(device_cuda_open());
	if (!j->worker->network || (j->backend == COMM_NCCL && !j->worker->device))
		return ERR(BACKEND_UNAVAILABLE, "the gang was started without what %s needs", comm_backend_name(j->backend));
	if (!json_is_object(json_object_get(j->doc, "comm")))
		return ERR(PROTOCOL, "a job over %s without a group", comm_backend_name(j->backend));
	return OK;
}

uint32_t exchange_members(const struct job *j, uint32_t world_size)
{
	uint32_t n = (uint32_t)num_min(world_size, j->worker->count);

	if (j->backend != COMM_NCCL || comm_nccl_shares_gpus())
		return n;
	return (uint32_t)num_max(num_min(n, device_cuda_count()), 1);
}

enum err exchange_part(struct job *j, const json_t *doc, const struct exec_spec *spec)
{
	struct comm *c = NULL;

	TRY(group_join(j, doc, spec->index, spec->count, &c));
	if (!c)
		return OK;
	enum err e = exchange_run(spec, c);
	struct err_info info = *err_last();
	group_leave(j->worker, c, e == OK);
	if (e)
		err_restore(&info);
	return e;
}
