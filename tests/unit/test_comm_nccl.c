/* test_comm_nccl.c: every collective over libnccl, the fake one or a real one; its errors are in test_comm_nccl_errors.c. */
#include "comm/comm.h"

#include "lib/t_nccl.h"
#include "tensor/small_float.h"

/* ---- moving ---- */

static void moves(void)
{
	static const uint64_t sizes[] = { 1, 1000, 200000 };

	open_group();
	C_TRUE(comm_rank(me.c) == me.rank && comm_size(me.c) == me.size);
	for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
		uint64_t n = sizes[k];
		unsigned char *mine = bytes_of(me.rank, n), *all = mem_zalloc(me.size, n);
		void *in = to_device(mine, n), *out = to_device(all, n * me.size);
		C_OK(comm_barrier(me.c));
		C_OK(comm_all_gather(me.c, in, n, out));
		from_device(all, out, n * me.size);
		for (uint32_t r = 0; r < me.size; r++)
			check_part(all + r * n, r, n);
		/* in its place of out */
		memset(all, 0, n * me.size);
		memcpy(all + me.rank * n, mine, n);
		device_free(me.d, out);
		out = to_device(all, n * me.size);
		C_OK(comm_all_gather(me.c, (char *)out + me.rank * n, n, out));
		from_device(all, out, n * me.size);
		for (uint32_t r = 0; r < me.size; r++)
			check_part(all + r * n, r, n);
		for (uint32_t root = 0; root < me.size; root++) {
			device_free(me.d, in);
			in = to_device(mine, n);
			C_OK(comm_broadcast(me.c, in, n, root));
			from_device(all, in, n);
			check_part(all, root, n);
		}
		device_free(me.d, in);
		device_free(me.d, out);
		mem_free(mine);
		mem_free(all);
	}
	C_OK(comm_broadcast(me.c, NULL, 0, 0));
	struct comm_counts counts = comm_counts(me.c);
	C_TRUE(counts.collectives > 0 && (counts.received_bytes > 0) == (me.size > 1));
	close_group();
}

static void test_moves(void **state)
{
	(void)state;
	run_sizes(moves);
	finish();
}

static void uneven(void)
{
	const uint64_t all_bytes[2][RANKS] = { { 5, 0, 70001, 1 }, { 0, 0, 3, 0 } };

	open_group();
	for (size_t k = 0; k < 2; k++) {
		const uint64_t *bytes = all_bytes[k];
		uint64_t sum = 0, at = 0;
		for (uint32_t r = 0; r < me.size; r++) {
			at += r < me.rank ? bytes[r] : 0;
			sum += bytes[r];
		}
		unsigned char *mine = bytes_of(me.rank, bytes[me.rank]), *all = mem_zalloc(sum + 1, 1);
		void *in = to_device(mine, bytes[me.rank]), *out = to_device(all, sum);
		C_OK(comm_all_gather_v(me.c, in, bytes, out));
		from_device(all, out, sum);
		for (uint32_t r = 0, off = 0; r < me.size; off += (uint32_t)bytes[r++])
			check_part(all + off, r, bytes[r]);
		for (uint32_t root = 0; root < me.size; root++) {
			void *full = NULL, *back = to_device(all, bytes[me.rank]);
			memset(all, 0, sum);
			if (me.rank == root)
				full = to_device(all, sum);
			C_OK(comm_gather(me.c, in, bytes, full, root));
			if (me.rank == root) {
				from_device(all, full, sum);
				for (uint32_t r = 0, off = 0; r < me.size; off += (uint32_t)bytes[r++])
					check_part(all + off, r, bytes[r]);
			}
			C_OK(comm_scatter(me.c, full, bytes, back, root));
			from_device(all, back, bytes[me.rank]);
			check_part(all, me.rank, bytes[me.rank]);
			device_free(me.d, full);
			device_free(me.d, back);
		}
		device_free(me.d, in);
		device_free(me.d, out);
		mem_free(mine);
		mem_free(all);
	}
	close_group();
}

static void test_uneven(void **state)
{
	(void)state;
	run_sizes(uneven);
	finish();
}

/* ---- reductions ---- */

static float value_of(uint32_t rank, uint64_t i)
{
	return (float)((rank + 1) * (i % 3 + 1)); /* small integers: exact in every dtype */
}

static double expected_of(enum reduce_op op, uint64_t i)
{
	double x = (double)value_of(0, i);

	for (uint32_t r = 1; r < me.size; r++) {
		double y = (double)value_of(r, i);
		x = op == REDUCE_PRODUCT ? x * y : op == REDUCE_MIN ? (x < y ? x : y) : op == REDUCE_MAX ? (x > y ? x : y) : x + y;
	}
	return op == REDUCE_AVG ? x / me.size : x;
}

static void put_value(enum dtype d, unsigned char *p, double v)
{
	float f = (float)v;
	int64_t i = (int64_t)v;
	uint32_t bits;
	uint16_t h = f16_encode(f);

	memcpy(&bits, &f, 4);
	if (d == DT_FLOAT64)
		memcpy(p, &v, 8);
	else if (d == DT_FLOAT32)
		memcpy(p, &f, 4);
	else if (d == DT_FLOAT16)
		memcpy(p, &h, 2);
	else if (d == DT_BFLOAT16)
		memcpy(p, (unsigned char *)&bits + 2, 2);
	else
		memcpy(p, &i, dtype_bytes(d)); /* little-endian */
}

static double get_value(enum dtype d, const unsigned char *p)
{
	double v;
	float f = 0;
	uint32_t bits = 0;
	int64_t i = 0;
	uint16_t h;

	if (d == DT_FLOAT64) {
		memcpy(&v, p, 8);
		return v;
	}
	if (d == DT_FLOAT16) {
		memcpy(&h, p, 2);
		return (double)f16_decode(h);
	}
	if (d == DT_FLOAT32 || d == DT_BFLOAT16) {
		memcpy((unsigned char *)&bits + (d == DT_BFLOAT16 ? 2 : 0), p, dtype_bytes(d));
		memcpy(&f, &bits, 4);
		return (double)f;
	}
	memcpy(&i, p, dtype_bytes(d));
	return (double)i;
}

static void check_values(enum dtype d, enum reduce_op op, const unsigned char *p, uint64_t first, uint64_t n)
{
	for (uint64_t i = 0; i < n; i++) {
		double want = expected_of(op, first + i), got = get_value(d, p + i * dtype_bytes(d));
		if (op == REDUCE_AVG && !dtype_is_float(d))
			want = (double)(int64_t)want;
		double slack = op == REDUCE_AVG ? (want < 0 ? -want : want) / 100 : 0; /* of thirds, in few bits */
		if (got < want - slack || got > want + slack) {
			fprintf(stderr, "%s, op %d, element %ju: %g, not %g\n", dtype_name(d), (int)op, (uintmax_t)(first + i), got, want);
			_exit(1);
		}
	}
}

static void reduce_as(enum dtype d, enum reduce_op op, uint64_t n)
{
	uint64_t item = dtype_bytes(d), total = n * me.size;
	unsigned char *p = mem_zalloc(total + 1, item);
	void *out = to_device(p, total * item);

	C_TRUE(p);
	for (uint64_t i = 0; i < total; i++)
		put_value(d, p + i * item, (double)value_of(me.rank, i));
	void *in = to_device(p, total * item);
	C_OK(comm_all_reduce(me.c, in, out, n, d, op));
	from_device(p, out, n * item);
	check_values(d, op, p, 0, n);
	C_OK(comm_reduce_scatter(me.c, in, out, n, d, op));
	from_device(p, out, n * item);
	check_values(d, op, p, me.rank * n, n);
	uint32_t root = me.size - 1;
	C_OK(comm_reduce(me.c, in, me.rank == root ? out : NULL, n, d, op, root));
	if (me.rank == root) {
		from_device(p, out, n * item);
		check_values(d, op, p, 0, n);
	}
	C_OK(comm_all_reduce(me.c, in, in, n, d, op)); /* in place */
	from_device(p, in, n * item);
	check_values(d, op, p, 0, n);
	device_free(me.d, in);
	device_free(me.d, out);
	mem_free(p);
}

static void reductions(void)
{
	static const enum dtype types[] = { DT_FLOAT32, DT_FLOAT64, DT_FLOAT16, DT_BFLOAT16, DT_INT64, DT_INT32, DT_INT8, DT_UINT8 };

	open_group();
	for (size_t t = 0; t < sizeof types / sizeof *types; t++)
		for (int op = 0; op < REDUCE_OPS; op++)
			if (op != REDUCE_PRODUCT || dtype_bytes(types[t]) > 2)
				reduce_as(types[t], (enum reduce_op)op, 301);
	reduce_as(DT_FLOAT32, REDUCE_SUM, 100000);
	reduce_as(DT_INT32, REDUCE_AVG, 700000); /* on the host, in several pieces */
	reduce_as(DT_FLOAT32, REDUCE_SUM, 0);
	close_group();
}

static void test_reductions(void **state)
{
	(void)state;
	run(reductions, 1);
	run(reductions, 3);
	finish();
}

/* ---- exchange ---- */

static void exchanges(void)
{
	static const struct { uint64_t count; uint32_t most; } cases[] = { { 0, 1 }, { 1, 100 }, { 5000, 600 }, { 60, COMM_BLOCK_MAX } };

	open_group();
	for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
		struct traffic t = traffic_of(cases[k].count, cases[k].most, (unsigned)k + 1);
		struct comm_exchange x = { t.messages, t.count, pack, unpack, &t };
		uint64_t out = 0, in = 0;
		C_OK(comm_exchange(me.c, &x));
		for (uint64_t i = 0; i < t.count; i++) {
			out += t.messages[i].from == me.rank;
			in += t.messages[i].to == me.rank;
		}
		C_TRUE(t.packed == out && t.unpacked == in);
		mem_free(t.messages);
	}
	close_group();
}

static void test_exchange(void **state)
{
	(void)state;
	run_sizes(exchanges);
	finish();
}

/* Rows to columns of an 8 × 12 matrix of host memory. */
static void boxes(void)
{
	enum { H = 8, W = 12 };
	const int64_t h = H / (int64_t)me.size, w = W / (int64_t)me.size, sizes[] = { h, w };
	const int64_t src[] = { W * 4, 4 }, dst[] = { w * 4, 4 };
	struct comm_box list[RANKS * RANKS];
	int32_t rows[H * W], columns[H * W];
	uint64_t n = 0;

	open_group();
	for (int32_t i = 0; i < h * W; i++)
		rows[i] = (int32_t)(me.rank * (uint32_t)h * W) + i;
	for (uint32_t from = 0; from < me.size; from++)
		for (uint32_t to = 0; to < me.size; to++)
			list[n++] = (struct comm_box){ .from = from, .to = to, .ndim = 2, .item_bytes = 4, .sizes = sizes,
						       .src_strides = src, .dst_strides = dst, .src = rows + to * w,
						       .dst = columns + from * h * w };
	C_OK(comm_all_to_all(me.c, list, n));
	for (int32_t i = 0; i < H; i++)
		for (int32_t k = 0; k < w; k++)
			C_TRUE(columns[i * w + k] == i * W + (int32_t)(me.rank * (uint32_t)w) + k);
	close_group();
}

static void test_boxes(void **state)
{
	(void)state;
	run(boxes, 1);
	run(boxes, 2);
	run(boxes, 4);
	finish();
}

/* ---- subgroups ---- */

static void gather_names(struct comm *c, const uint32_t *want)
{
	uint32_t got[RANKS] = { 0 };
	void *in = to_device(&me.rank, 4), *out = to_device(got, sizeof got);

	C_OK(comm_all_gather(c, in, 4, out));
	from_device(got, out, sizeof got);
	C_TRUE(memcmp(got, want, comm_size(c) * 4) == 0);
	device_free(me.d, in);
	device_free(me.d, out);
}

static void subgroups(void)
{
	const uint32_t backwards[] = { 3, 1, 0 };
	struct comm *sub, *row, *column;

	open_group();
	if (me.rank != 2) {
		C_OK(comm_split(me.c, backwards, 3, &sub));
		C_TRUE(comm_rank(sub) == (me.rank == 3 ? 0 : me.rank == 1 ? 1 : 2));
		gather_names(sub, backwards);
		comm_close(sub);
	}
	C_OK(comm_split_mesh(me.c, (const int64_t[]){ 2, 2 }, 2, 0, &column));
	C_OK(comm_split_mesh(me.c, (const int64_t[]){ 2, 2 }, 2, 1, &row));
	gather_names(column, (const uint32_t[]){ me.rank % 2, me.rank % 2 + 2 });
	gather_names(row, (const uint32_t[]){ me.rank & 2, (me.rank & 2) + 1 });
	gather_names(me.c, (const uint32_t[]){ 0, 1, 2, 3 });
	/* an error in a subgroup is the whole group's, with the rank there */
	struct traffic t = { .messages = (struct comm_message[]){ { 1, 0, 4 } }, .count = 1, .fail = ERR_FORMAT_IMAGE };
	struct comm_exchange x = { t.messages, 1, pack, unpack, &t };
	if (me.rank >= 2) {
		uint32_t real = me.rank;
		t.messages[0] = (struct comm_message){ 1, 0, 4 };
		me.rank = real == 3 ? 1 : 0; /* what the callbacks compare with */
		C_ERR(FORMAT_IMAGE, comm_exchange(row, &x));
		C_TRUE(err_last()->rank == 3);
		me.rank = real;
	}
	if (me.rank >= 2)
		C_ERR(FORMAT_IMAGE, comm_barrier(me.c));
	else
		C_ERR(FORMAT_IMAGE, comm_barrier(me.c)); /* the others' last word */
	C_TRUE(err_last()->rank == 3);
	comm_close(row);
	comm_close(column);
	close_group();
}

static void test_subgroups(void **state)
{
	(void)state;
	run(subgroups, 4);
	finish();
}

/* ---- shared memory inside a host, NCCL between two of them: buffers are host memory ---- */

static int arenas[2];

static void hosts(void)
{
	static const uint32_t places[RANKS] = { 7, 7, 9, 9 };
	enum { N = (5 << 20) + 3 };
	struct comm_spec spec;
	struct comm *sub;

	open_device();
	spec = spec_of();
	spec.hosts = places;
	spec.inside = COMM_SHM;
	spec.arena_fd = arenas[me.rank / 2];
	C_OK(comm_open(&spec, &me.c));
	C_OK(comm_barrier(me.c));
	for (uint32_t root = 0; root < me.size; root++) {
		unsigned char *p = bytes_of(me.rank, N);
		C_OK(comm_broadcast(me.c, p, N, root));
		check_part(p, root, N);
		mem_free(p);
	}
	const uint64_t bytes[RANKS] = { 5, 0, (1 << 20) + 1, 77 };
	unsigned char *mine = bytes_of(me.rank, bytes[me.rank]), *all = mem_zalloc(1, (1 << 20) + 83);
	C_TRUE(all);
	C_OK(comm_all_gather_v(me.c, mine, bytes, all));
	for (uint64_t r = 0, at = 0; r < me.size; at += bytes[r++])
		check_part(all + at, (uint32_t)r, bytes[r]);
	int32_t sum[3] = { (int32_t)me.rank, 10, -(int32_t)me.rank };
	C_OK(comm_all_reduce(me.c, sum, sum, 3, DT_INT32, REDUCE_SUM));
	C_TRUE(sum[0] == 6 && sum[1] == 40 && sum[2] == -6);
	struct traffic t = traffic_of(300, 50000, 9);
	struct comm_exchange x = { t.messages, t.count, pack, unpack, &t };
	C_OK(comm_exchange(me.c, &x));
	if (me.rank == 1 || me.rank == 2) {
		C_OK(comm_split(me.c, (const uint32_t[]){ 2, 1 }, 2, &sub));
		unsigned char *p = bytes_of(me.rank, 1000);
		C_OK(comm_broadcast(sub, p, 1000, 0));
		check_part(p, 2, 1000);
		mem_free(p);
		comm_close(sub);
	}
	C_OK(comm_barrier(me.c));
	C_TRUE(comm_counts(me.c).sent_bytes > 0);
	mem_free(mine);
	mem_free(all);
	mem_free(t.messages);
	close_group();
}

static void test_hosts(void **state)
{
	(void)state;
	for (int i = 0; i < 2; i++)
		T_OK(comm_arena_new(2, &arenas[i]));
	run(hosts, 4);
	for (int i = 0; i < 2; i++)
		close(arenas[i]);
	finish();
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_moves),	 cmocka_unit_test(test_uneven), cmocka_unit_test(test_reductions),
		cmocka_unit_test(test_exchange), cmocka_unit_test(test_boxes),	cmocka_unit_test(test_subgroups),
		cmocka_unit_test(test_hosts),
	};

	(void)argc;
	t_fakes_use(argv);
	return share() ? cmocka_run_group_tests_name("comm_nccl", tests, NULL, NULL) : 1;
}
