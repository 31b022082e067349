/* t_collectives.h: one test of every collective, the same for all back ends: each member computes what it must get. */
#pragma once
#include "lib/t_group.h"

/* Filling and looking are the tests' own business: under the thread sanitizer they would take most of the time. */
#define T_PLAIN __attribute__((no_sanitize("thread")))

/* Byte i of what member r brings to call n. */
T_PLAIN static inline unsigned char t_byte(uint32_t r, uint32_t n, uint64_t i)
{
	return (unsigned char)(r * 37 + n * 11 + i * 7 + (i >> 8) * 13 + (i >> 16) * 29);
}

T_PLAIN static inline unsigned char *t_bytes(uint32_t r, uint32_t n, uint64_t bytes)
{
	unsigned char *p = malloc(bytes + 1);

	T_CHECK(p);
	for (uint64_t i = 0; i < bytes; i++)
		p[i] = t_byte(r, n, i);
	return p;
}

T_PLAIN static inline bool t_is(const unsigned char *p, uint32_t r, uint32_t n, uint64_t from, uint64_t bytes)
{
	for (uint64_t i = 0; i < bytes; i++)
		if (p[i] != t_byte(r, n, from + i))
			return false;
	return true;
}

static inline enum err t_all_gathers(struct comm *c, uint64_t bytes, uint32_t n)
{
	uint32_t me = comm_rank(c), size = comm_size(c);
	uint64_t parts[T_RANKS], total = 0, at = 0;
	unsigned char *in = t_bytes(me, n, bytes + size), *out = malloc((bytes + size) * size + 1);

	TRY(comm_all_gather(c, in, bytes, out));
	for (uint32_t r = 0; r < size; r++)
		T_CHECK(t_is(out + r * bytes, r, n, 0, bytes));
	/* In its place of the output, uneven, one of them empty. */
	for (uint32_t r = 0; r < size; r++)
		total += parts[r] = r == n % size ? 0 : bytes + r;
	for (uint32_t r = 0; r < me; r++)
		at += parts[r];
	memset(out, 0, total);
	memcpy(out + at, in, parts[me]);
	TRY(comm_all_gather_v(c, out + at, parts, out));
	at = 0;
	for (uint32_t r = 0; r < size; r++) {
		T_CHECK(t_is(out + at, r, n, 0, parts[r]));
		at += parts[r];
	}
	free(in);
	free(out);
	return OK;
}

static inline enum err t_rooted(struct comm *c, uint64_t bytes, uint32_t n)
{
	uint32_t me = comm_rank(c), size = comm_size(c), root = n % size;
	uint64_t parts[T_RANKS], at = 0;
	unsigned char *in = t_bytes(me, n, (bytes + size) * size), *out = malloc((bytes + size) * size + 1);

	if (me == root)
		memcpy(out, in, bytes);
	TRY(comm_broadcast(c, out, bytes, root));
	T_CHECK(t_is(out, root, n, 0, bytes));
	for (uint32_t r = 0; r < size; r++)
		parts[r] = r == (n + 1) % size && size > 1 ? 0 : bytes + r;
	TRY(comm_gather(c, in, parts, me == root ? out : NULL, root));
	for (uint32_t r = 0; me == root && r < size; r++) {
		T_CHECK(t_is(out + at, r, n, 0, parts[r]));
		at += parts[r];
	}
	TRY(comm_scatter(c, me == root ? in : NULL, parts, out, root));
	at = 0;
	for (uint32_t r = 0; r < me; r++)
		at += parts[r];
	T_CHECK(t_is(out, root, n, at, parts[me]));
	free(in);
	free(out);
	return OK;
}

static inline enum err t_reductions(struct comm *c, uint64_t count, uint32_t n)
{
	uint32_t me = comm_rank(c), size = comm_size(c), root = n % size;
	int32_t *in = malloc((count * size + 1) * 4), *out = malloc((count * size + 1) * 4);

	for (uint64_t i = 0; i < count * size; i++)
		in[i] = (int32_t)(i * 3 + me * 1000 + n);
	TRY(comm_all_reduce(c, in, out, count, DT_INT32, REDUCE_SUM));
	for (uint64_t i = 0; i < count; i++)
		T_CHECK(out[i] == (int32_t)(size * (i * 3 + n) + 1000 * (size * (size - 1) / 2)));
	TRY(comm_reduce(c, in, out, count, DT_INT32, REDUCE_MAX, root));
	for (uint64_t i = 0; me == root && i < count; i++)
		T_CHECK(out[i] == (int32_t)(i * 3 + (size - 1) * 1000 + n));
	TRY(comm_reduce_scatter(c, in, out, count, DT_INT32, REDUCE_MIN));
	for (uint64_t i = 0; i < count; i++)
		T_CHECK(out[i] == (int32_t)((i + me * count) * 3 + n));
	TRY(comm_all_reduce(c, in, in, count, DT_INT32, REDUCE_AVG));
	for (uint64_t i = 0; i < count; i++)
		T_CHECK(in[i] == (int32_t)((size * (i * 3 + n) + 1000 * (size * (size - 1) / 2)) / size));
	free(in);
	free(out);
	return OK;
}

struct t_mail {
	const struct comm_message *messages;
	uint32_t me;
	uint64_t last[T_RANKS][2];     /* of each pair, 1 + the last index that was packed and unpacked */
	uint64_t unpacked;
};

static inline enum err t_pack(void *user, uint64_t i, void *out)
{
	struct t_mail *m = user;
	const struct comm_message *x = &m->messages[i];

	T_CHECK(x->from == m->me && m->last[x->to][0] <= i);
	m->last[x->to][0] = i + 1;
	for (uint32_t k = 0; k < x->bytes; k++)
		((unsigned char *)out)[k] = t_byte(x->from, (uint32_t)i, k);
	return OK;
}

static inline enum err t_unpack(void *user, uint64_t i, const void *in)
{
	struct t_mail *m = user;
	const struct comm_message *x = &m->messages[i];

	T_CHECK(x->to == m->me && m->last[x->from][1] <= i);
	m->last[x->from][1] = i + 1;
	T_CHECK(t_is(in, x->from, (uint32_t)i, 0, x->bytes));
	m->unpacked++;
	return OK;
}

static inline enum err t_exchanges(struct comm *c, uint32_t count, uint32_t seed)
{
	struct comm_message *messages = malloc((count + 1) * sizeof *messages);
	struct t_mail mail = { .messages = messages, .me = comm_rank(c) };
	uint64_t mine = 0;

	for (uint32_t i = 0; i < count; i++) {
		seed = seed * 1664525 + 1013904223;
		uint32_t kind = seed >> 28;
		uint32_t bytes = kind == 0 ? COMM_BLOCK_MAX : kind == 1 ? 0 : kind < 5 ? seed >> 12 & 0x3FFFF : seed >> 20 & 0xFF;
		messages[i] = (struct comm_message){ (seed >> 8) % comm_size(c), (seed >> 16) % comm_size(c), bytes };
		mine += messages[i].to == mail.me;
	}
	struct comm_exchange x = { messages, count, t_pack, t_unpack, &mail };
	TRY(comm_exchange(c, &x));
	T_CHECK(mail.unpacked == mine);
	free(messages);
	return OK;
}

/* A matrix of rows × columns of int32, by rows; afterwards by columns. Rows of a member: rows / size. */
static inline enum err t_transposition(struct comm *c, int64_t rows, int64_t columns)
{
	uint32_t me = comm_rank(c), size = comm_size(c);
	int64_t r_each = rows / size, c_each = columns / size, sizes[2] = { r_each, c_each };
	int64_t src_strides[2] = { columns * 4, 4 }, dst_strides[2] = { c_each * 4, 4 };
	int32_t *in = malloc((size_t)(r_each * columns * 4 + 1)), *out = malloc((size_t)(rows * c_each * 4 + 1));
	struct comm_box boxes[T_RANKS * T_RANKS];

	for (int64_t i = 0; i < r_each * columns; i++)
		in[i] = (int32_t)(i + me * r_each * columns);
	for (uint32_t i = 0; i < size * size; i++) {
		uint32_t from = i / size, to = i % size;
		boxes[i] = (struct comm_box){ from, to, 2, 4, sizes, src_strides, dst_strides, in + to * c_each,
					       out + from * r_each * c_each };
	}
	TRY(comm_all_to_all(c, boxes, size * size));
	for (int64_t i = 0; i < rows * c_each; i++)
		T_CHECK(out[i] == (int32_t)(i / c_each * columns + me * c_each + i % c_each));
	free(in);
	free(out);
	return OK;
}

/* Closes sub whatever comes of it. */
static inline enum err t_in_subgroup(struct comm *sub, uint32_t me, int which)
{
	uint32_t sum = 0;
	enum err e;

	if (which == 0) {
		e = comm_all_reduce(sub, &me, &sum, 1, DT_UINT32, REDUCE_SUM);
		T_CHECK(e || (comm_size(sub) == 2 && comm_rank(sub) == me % 2 && sum == (me & ~1u) * 2 + 1));
		e = e ? e : t_all_gathers(sub, 300000, 1);
	} else if (which == 1) {
		T_CHECK(comm_rank(sub) == me / 2);
		e = t_exchanges(sub, 50, 5);
	} else {
		T_CHECK(comm_rank(sub) == comm_size(sub) - 1 - me);
		e = t_rooted(sub, 1000, 0);
	}
	comm_close(sub);
	return e;
}

/* Subgroups of a mesh of size/2 × 2, and one of a list in another order; twice, since they may come and go. */
static inline enum err t_subgroups(struct comm *c)
{
	uint32_t me = comm_rank(c), size = comm_size(c);
	int64_t mesh[2] = { size / 2, 2 };
	uint32_t back[T_RANKS];
	struct comm *sub;

	if (size % 2)
		return OK;
	for (uint32_t r = 0; r < size; r++)
		back[r] = size - 1 - r;
	for (int round = 0; round < 2; round++) {
		TRY(comm_split_mesh(c, mesh, 2, 1, &sub));
		TRY(t_in_subgroup(sub, me, 0));
		TRY(comm_split_mesh(c, mesh, 2, 0, &sub));
		TRY(t_in_subgroup(sub, me, 1));
		TRY(comm_split(c, back, size, &sub));
		TRY(t_in_subgroup(sub, me, 2));
	}
	return comm_barrier(c);
}

static inline enum err t_every_collective(struct comm *c, struct t_group *g)
{
	static const uint64_t sizes[] = { 0, 1, 7, 1024, 16384, 16385, 100001, 262144, 1048583, 5000001 };
	uint32_t n = 0;

	(void)g;
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		TRY(comm_barrier(c));
		TRY(t_all_gathers(c, sizes[i], n++));
		TRY(t_rooted(c, sizes[i], n++));
		TRY(t_reductions(c, sizes[i] / 4, n++));
	}
	TRY(t_exchanges(c, 0, 1));
	TRY(t_exchanges(c, 1, 2));
	TRY(t_exchanges(c, 300, 3));
	TRY(t_transposition(c, 60, 120));
	TRY(t_transposition(c, 1200, 3600));
	return t_subgroups(c);
}
