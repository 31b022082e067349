/* test_dcp_meta.c: `.metadata` read, written and merged; damage of every kind. Agreement with
 * PyTorch: tests/interop/test_metadata.py. */
#include "lib/t.h"

#include "base/mem.h"
#include "format/dcp_meta.h"

static enum err into_buf(void *user, const void *bytes, size_t n)
{
	buf_put(user, bytes, n);
	return OK;
}

static const struct dcp_meta_opts opts = { .save_id = "6f1c9d0e-0000-4000-8000-000000000000" };

/* Two ranks' rows of "w", a scalar, and a value in a second file with a transform. */
static struct sdict *sample(uint32_t first_rank)
{
	const int64_t shape[] = { 4, 3 }, rows[2][4] = { { 0, 0, 2, 3 }, { 2, 0, 2, 3 } };
	const struct sd_path_part parts[] = { { STR("model"), 0 }, { { NULL, 0 }, -3 }, { STR(""), 0 } };
	uint32_t file[2], w, step, value, zstd;
	struct sdict *sd;
	char name[32];

	T_OK(sdict_new(1 << 20, &sd));
	sd->has_paths = true;
	for (uint32_t i = 0; i < 2; i++) {
		int n = snprintf(name, sizeof name, "__%u_0.distcp", first_rank + i);
		T_OK(sdict_add_file(sd, (struct str){ name, (size_t)n }, first_rank + i, &file[i]));
	}
	T_OK(sdict_add_transform(sd, STR("stream.zstd/1 other/2"), &zstd));
	T_OK(sdict_add_tensor(sd, STR("w"), DT_BFLOAT16, 2, shape, &w));
	T_OK(sdict_copy_path(sd, (struct sd_path){ parts, 3 }, &sd->tensors[w].path));
	sd->tensors[w].requires_grad = true;
	for (uint32_t i = 0; i < 2; i++)
		T_OK(sdict_add_chunk(sd, w, rows[i], first_rank + i, (struct sd_loc){ file[i], 0, 4096ull << 40 * i, 1000 }));
	T_OK(sdict_add_tensor(sd, STR("__metadata__"), DT_FLOAT8_E8M0FNU, 0, NULL, &step));
	T_OK(sdict_add_chunk(sd, step, NULL, first_rank, (struct sd_loc){ file[0], 0, 70000, 300 }));
	T_OK(sdict_add_value(sd, STR("v\xed\xb0\x80"), first_rank + 1, (struct sd_loc){ file[1], zstd, 1ull << 31, 5 }, &value));
	return sd;
}

static void write_to(const struct sdict *sd, struct buf *b)
{
	*b = BUF_INIT(64 << 20);
	T_OK(dcp_meta_write(sd, &opts, into_buf, b));
	T_OK(buf_status(b));
}

static void check_sample(const struct sdict *sd)
{
	assert_int_equal(sd->tensor_count, 2);
	assert_int_equal(sd->value_count, 1);
	const struct sd_tensor *w = sdict_tensor(sd, STR("w")), *m = sdict_tensor(sd, STR("__metadata__"));
	assert_true(w && m && w->dtype == DT_BFLOAT16 && w->requires_grad && w->chunk_count == 2);
	assert_true(w->shape[0] == 4 && w->shape[1] == 3);
	assert_int_equal(w->path.count, 3);
	assert_true(str_is(w->path.parts[0].key, "model") && !w->path.parts[1].key.p && w->path.parts[1].index == -3);
	assert_true(w->path.parts[2].key.p && w->path.parts[2].key.n == 0);
	const struct sd_chunk *c = &sd->chunks[w->first_chunk + 1];
	assert_true(c->dims[0] == 2 && c->dims[2] == 2 && c->dims[3] == 3 && c->rank == 8);
	assert_true(c->loc.offset == 4096ull << 40 && c->loc.length == 1000 && c->loc.transform == 0);
	assert_true(str_is(sd->files[c->loc.file].name, "__8_0.distcp") && sd->files[c->loc.file].rank == 8);
	assert_true(m->ndim == 0 && m->chunk_count == 1 && m->dtype == DT_FLOAT8_E8M0FNU);
	const struct sd_value *v = sdict_value(sd, STR("v\xed\xb0\x80"));
	assert_true(v && v->kind == SD_VALUE_STORED && v->rank == 8 && v->loc.offset == 1ull << 31);
	assert_true(str_is(sd->transforms[v->loc.transform - 1], "stream.zstd/1 other/2"));
}

static void round_trip(void **state)
{
	struct sdict *sd = sample(7), *again;
	struct buf b;
	(void)state;

	write_to(sd, &b);
	T_OK(dcp_meta_read(b.p, b.len, &again));
	buf_free(&b); /* nothing may point into the bytes */
	check_sample(again);
	sdict_free(again);
	sd->has_paths = false;
	write_to(sd, &b);
	T_OK(dcp_meta_read(b.p, b.len, &again));
	assert_false(again->has_paths);
	assert_int_equal(again->tensors[0].path.count, 0);
	sdict_free(again);
	sdict_free(sd);
	buf_free(&b);
}

static void *slurp(const char *path, size_t *n)
{
	FILE *f = fopen(path, "rb");
	void *p;

	if (!f)
		T_FAIL("%s is missing", path);
	fseek(f, 0, SEEK_END);
	*n = (size_t)ftell(f);
	rewind(f);
	p = mem_alloc(*n);
	assert_non_null(p);
	assert_int_equal(fread(p, 1, *n, f), *n);
	fclose(f);
	return p;
}

static const char *const real_files[] = {
	"tests/fixtures/torch-2.2.2/plain/checkpoint/.metadata",
	"tests/fixtures/torch-2.15.0/zstd/checkpoint/.metadata",
	"tests/fixtures/torch-2.15.0/odd_keys/checkpoint/.metadata",
};

/* Every prefix of a real file is refused; bytes behind STOP are not looked at. */
static void truncation(void **state)
{
	(void)state;
	for (size_t i = 0; i < sizeof real_files / sizeof *real_files; i++) {
		size_t n;
		char *p = slurp(real_files[i], &n);
		struct sdict *sd;
		T_OK(dcp_meta_read(p, n, &sd));
		sdict_free(sd);
		for (size_t cut = 0; cut < n; cut++) {
			char *exact = mem_alloc(cut); /* so that a sanitizer sees the end */
			assert_non_null(exact);
			memcpy(exact, p, cut);
			T_ERR(FORMAT_PICKLE, dcp_meta_read(exact, cut, &sd));
			mem_free(exact);
		}
		mem_free(p);
	}
}

/* Every byte changed in several ways: an error or a structure, never more. */
static void damage(void **state)
{
	unsigned read = 0, refused = 0;
	(void)state;

	for (size_t i = 0; i < sizeof real_files / sizeof *real_files; i++) {
		size_t n;
		unsigned char *p = slurp(real_files[i], &n);
		for (size_t at = 0; at < n; at++)
			for (unsigned x = 1; x < 256; x = x * 3 + 1) {
				struct sdict *sd;
				p[at] ^= (unsigned char)x;
				if (dcp_meta_read(p, n, &sd) == OK) {
					sdict_free(sd);
					read++;
				} else {
					refused++;
				}
				p[at] ^= (unsigned char)x;
			}
		mem_free(p);
	}
	assert_true(read > 0 && refused > read);
}

static void write_refuses_what_has_no_place(void **state)
{
	struct sdict *sd = sample(7);
	struct buf b = BUF_INIT(1 << 20);
	(void)state;

	sd->chunks[1].loc.file = SD_NO_FILE;
	T_ERR(FORMAT_METADATA, dcp_meta_write(sd, &opts, into_buf, &b));
	assert_string_equal(err_last()->fqn, "w");
	sd->chunks[1].loc.file = 0;
	sd->values[0].loc.file = SD_NO_FILE;
	T_ERR(FORMAT_METADATA, dcp_meta_write(sd, &opts, into_buf, &b));
	assert_int_equal(b.len, 0);
	sd->values[0].loc.file = 0;
	sd->values[0].fqn = STR("\xff");
	T_ERR(FORMAT_METADATA, dcp_meta_write(sd, &opts, into_buf, &b));
	sdict_free(sd);
	buf_free(&b);
}

static enum err full(void *user, const void *bytes, size_t n)
{
	(void)bytes;
	*(size_t *)user += n;
	return ERR(STORAGE_FULL, "full");
}

static void the_sinks_error_comes_back(void **state)
{
	struct sdict *sd = sample(7);
	size_t seen = 0;
	(void)state;

	T_ERR(STORAGE_FULL, dcp_meta_write(sd, &opts, full, &seen));
	assert_true(seen > 0);
	sdict_free(sd);
}

/* Rank-local parts: 0 has rows 0-1 and everything else, 1 has all again under other file names and one more tensor. */
static void unions(void **state)
{
	struct sdict *a = sample(7), *b = sample(20), *parts[] = { a, b }, *sd;
	const int64_t shape[] = { 4, 3 }, dims[] = { 2 };
	uint32_t extra;
	(void)state;

	a->tensors[0].chunk_count = 1; /* rows 0 and 1 only; the others are left over */
	T_OK(sdict_add_tensor(b, STR("extra"), DT_INT8, 1, dims, &extra));
	T_OK(sdict_add_chunk(b, extra, (const int64_t[]){ 0, 2 }, 21, (struct sd_loc){ 1, 0, 9, 9 }));
	T_OK(dcp_meta_union(parts, 2, &sd));
	assert_int_equal(sd->tensor_count, 3);
	const struct sd_tensor *w = sdict_tensor(sd, STR("w"));
	assert_int_equal(w->chunk_count, 2);
	assert_int_equal(sd->chunks[w->first_chunk].rank, 7);      /* equal boxes once, from the lowest */
	assert_int_equal(sd->chunks[w->first_chunk + 1].rank, 21); /* what only the other has */
	assert_true(str_is(sd->files[sd->chunks[w->first_chunk + 1].loc.file].name, "__21_0.distcp"));
	assert_int_equal(sdict_value(sd, STR("v\xed\xb0\x80"))->rank, 8);
	assert_int_equal(sdict_tensor(sd, STR("extra"))->chunk_count, 1);
	assert_int_equal(w->path.count, 3);
	sdict_free(sd);
	b->tensors[0].dtype = DT_FLOAT16;
	T_ERR(FORMAT_METADATA, dcp_meta_union(parts, 2, &sd));
	assert_string_equal(err_last()->fqn, "w");
	assert_int_equal(err_last()->rank, 1);
	b->tensors[0].dtype = DT_BFLOAT16;
	b->tensors[0].shape = (const int64_t[]){ 4, 4 };
	T_ERR(FORMAT_METADATA, dcp_meta_union(parts, 2, &sd));
	b->tensors[0].shape = shape;
	uint32_t index;
	T_OK(sdict_add_value(a, STR("extra"), 7, (struct sd_loc){ 0, 0, 1, 1 }, &index));
	T_ERR(FORMAT_METADATA, dcp_meta_union(parts, 2, &sd));
	assert_string_equal(err_last()->fqn, "extra");
	sdict_free(a);
	sdict_free(b);
}

/* Streams written by hand. M, T, C …: what each class pushes. */
#define MOD "torch.distributed.checkpoint.metadata\n"
#define META_HEAD "c" MOD "Metadata\n)\x81}("
#define KEY(s) "V" s "\n"
#define PROPS "c" MOD "TensorProperties\n)\x81(ctorch\nfloat32\nNI00\nNI00\ntb"
#define SIZE1(k) "ctorch\nSize\n" k "\x85\x85R"
#define CHUNK1(off, size) "c" MOD "ChunkStorageMetadata\n)\x81}(" KEY("offsets") SIZE1(off) KEY("sizes") SIZE1(size) "ub"
#define TENSOR1(size, chunks) "c" MOD "TensorStorageMetadata\n)\x81}(" KEY("properties") PROPS KEY("size") SIZE1(size) \
	KEY("chunks") "(" chunks "lub"
#define INDEX1(fqn, off) "c" MOD "MetadataIndex\n)\x81}(" KEY("fqn") KEY(fqn) KEY("index") "K\x63" KEY("offset") off "ub"
#define INFO(path, off, len) "ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81}(" KEY("relative_path") KEY(path) \
	KEY("offset") off KEY("length") len "ub"
#define META(state, storage) META_HEAD KEY("state_dict_metadata") "(" state "d" KEY("storage_data") "(" storage "dub."

static struct sdict *read_ok(const char *bytes, size_t n)
{
	struct sdict *sd;

	T_OK(dcp_meta_read(bytes, n, &sd));
	return sd;
}
#define READ(literal) read_ok(literal, sizeof(literal) - 1)

static void read_fails(enum err code, const char *bytes, size_t n, const char *says, const char *fqn)
{
	struct sdict *sd;
	enum err e = dcp_meta_read(bytes, n, &sd);

	if (e != code || !strstr(err_last()->text, says))
		T_FAIL("%s: '%s' instead of %s '%s'", err_code_name(e), e ? err_last()->text : "", err_code_name(code), says);
	assert_string_equal(err_last()->fqn, fqn);
}
#define FAILS(code, literal, says, fqn) read_fails(ERR_##code, literal, sizeof(literal) - 1, says, fqn)

static void odd_but_legal(void **state)
{
	struct sdict *sd;
	(void)state;

	/* Without planner_data, storage_meta, version; a wrong hint; an index without offset; entries nobody asks for. */
	sd = READ(META(KEY("a") TENSOR1("K\x04", CHUNK1("K\x00", "K\x02") CHUNK1("K\x02", "K\x02"))
		       KEY("b") TENSOR1("K\x01", CHUNK1("K\x00", "K\x01")) KEY("v") "c" MOD "BytesStorageMetadata\n)\x81}b",
		       INDEX1("a", SIZE1("K\x02")) INFO("d/__5_1.distcp", "K\x07", "K\x08")
		       INDEX1("a", SIZE1("K\x00")) INFO("__x_1.distcp", "K\x00", "K\x00")
		       INDEX1("b", "N") INFO("b", "K\x01", "K\x01") INDEX1("v", "N") INFO("b", "K\x02", "K\x01")
		       INDEX1("a", SIZE1("K\x03")) INFO("../x", "K\x07", "K\x08") INDEX1("zzz", "N") "N"
		       "K\x01N" INDEX1("v", SIZE1("K\x03")) "N"));
	assert_false(sd->has_paths);
	assert_int_equal(sd->chunks[1].loc.offset, 7);
	assert_int_equal(sd->chunks[1].rank, 5);
	assert_int_equal(sd->chunks[0].rank, 0);
	assert_int_equal(sd->file_count, 3);
	assert_int_equal(sd->values[0].loc.offset, 2);
	sdict_free(sd);
	/* The same entry twice says nothing new. */
	sd = READ(META(KEY("v") "c" MOD "BytesStorageMetadata\n)\x81",
		       INDEX1("v", "N") INFO("b", "K\x02", "K\x01") INDEX1("v", "N") INFO("b", "K\x02", "K\x01")));
	sdict_free(sd);
	sd = READ(META("", "")); /* nothing at all */
	assert_int_equal(sd->tensor_count + sd->value_count, 0);
	sdict_free(sd);
}

#define ONE(chunks, storage) META(KEY("a") TENSOR1("K\x04", chunks), storage)
#define PLACED(path, off, len) ONE(CHUNK1("K\x00", "K\x04"), INDEX1("a", SIZE1("K\x00")) INFO(path, off, len))

static void what_cannot_be(void **state)
{
	(void)state;
	FAILS(FORMAT_METADATA, "N.", "the pickle holds a None", "");
	FAILS(FORMAT_METADATA, "cposix\nsystem\nU\x04true\x85R.", "posix.system", "");
	FAILS(FORMAT_METADATA, META_HEAD "ub.", "state_dict_metadata is no dict", "");
	FAILS(FORMAT_METADATA, META("K\x01" TENSOR1("K\x04", ""), ""), "a key of state_dict_metadata is a int", "");
	FAILS(FORMAT_METADATA, META(KEY("a") "cevil\nThing\n)R", ""), "evil.Thing", "a");
	FAILS(DUPLICATE_KEY, META(KEY("a") TENSOR1("K\x04", "") KEY("a") TENSOR1("K\x04", ""), ""), "twice", "a");
	FAILS(FORMAT_METADATA, ONE(CHUNK1("K\x00", "K\x04"), ""), "no entry for the chunk at [0]", "a");
	FAILS(FORMAT_METADATA, ONE(CHUNK1("K\x00", "K\x04") CHUNK1("K\x00", "K\x04"), ""), "two chunks at [0]", "a");
	FAILS(FORMAT_METADATA, ONE(CHUNK1("K\x00", "I-1\n"), ""), "is -1", "a");
	FAILS(FORMAT_METADATA, ONE(CHUNK1("K\x00", "N"), ""), "no 64-bit int", "a");
	FAILS(FORMAT_METADATA, ONE(CHUNK1("K\x00", "L99999999999999999999L\n"), ""), "no 64-bit int", "a");
	FAILS(FORMAT_METADATA, ONE("N", ""), "a chunk is a None", "a");
	FAILS(FORMAT_METADATA, PLACED("..", "K\x00", "K\x04"), "'..' is no name", "a");
	FAILS(FORMAT_METADATA, PLACED("a/../b", "K\x00", "K\x04"), "is no name", "a");
	FAILS(FORMAT_METADATA, PLACED("/b", "K\x00", "K\x04"), "is no name", "a");
	FAILS(FORMAT_METADATA, PLACED("b/", "K\x00", "K\x04"), "is no name", "a");
	FAILS(FORMAT_METADATA, PLACED("./b", "K\x00", "K\x04"), "is no name", "a");
	FAILS(FORMAT_METADATA, PLACED("", "K\x00", "K\x04"), "is no name", "a");
	FAILS(FORMAT_METADATA, PLACED("a\\u0000b", "K\x00", "K\x04"), "is no name", "a");
	FAILS(FORMAT_METADATA, PLACED("b", "I-5\n", "K\x04"), "cannot be", "a");
	FAILS(FORMAT_METADATA, PLACED("b", "K\x00", "I-4\n"), "cannot be", "a");
	FAILS(FORMAT_METADATA, PLACED("b", "L9223372036854775807L\n", "K\x01"), "cannot be", "a");
	FAILS(FORMAT_METADATA, ONE(CHUNK1("K\x00", "K\x04"), INDEX1("a", SIZE1("K\x00")) "K\x05"), "told by a int", "a");
	FAILS(FORMAT_METADATA, ONE(CHUNK1("K\x00", "K\x04"), INDEX1("a", SIZE1("K\x00")) INFO("b", "K\x00", "K\x01")
	      INDEX1("a", SIZE1("K\x00")) INFO("b", "K\x01", "K\x01")), "two places", "a");
	FAILS(FORMAT_METADATA, META(KEY("a") "c" MOD "TensorStorageMetadata\n)\x81", ""), "is a nothing", "a");
#define WITH_PROPS(state) META(KEY("a") "c" MOD "TensorStorageMetadata\n)\x81}(" KEY("size") SIZE1("K\x04") KEY("properties") \
	"c" MOD "TensorProperties\n)\x81(" state "tbub", "")
	FAILS(FORMAT_METADATA, WITH_PROPS("ctorch\nint8\nNNN"), "5 or 6 values", "a");
	FAILS(FORMAT_METADATA, WITH_PROPS("ctorch\nint8\nNNNNNN"), "5 or 6 values", "a");
	FAILS(FORMAT_METADATA, WITH_PROPS("cnumpy\nint8\nNNNN"), "the dtype of a tensor is a numpy.int8", "a");
	FAILS(DTYPE_UNSUPPORTED, WITH_PROPS("ctorch\nqint8\nNNNN"), "qint8", "a");
	FAILS(FORMAT_METADATA, WITH_PROPS("ctorch\nint8\nctorch.serialization\n_get_layout\nVtorch.sparse_coo\n\x85RNNN"),
	      "layout torch.sparse_coo", "a");
	FAILS(FORMAT_METADATA, META(KEY("a") "c" MOD "BytesStorageMetadata\n)\x81", ""), "no entry for the value", "a");
}

static void a_chunk_outside_or_too_large(void **state)
{
	struct sdict *sd;
	(void)state;

	const char outside[] = ONE(CHUNK1("K\x01", "K\x04"), "");
	assert_true(dcp_meta_read(outside, sizeof outside - 1, &sd) != OK);
	assert_non_null(strstr(err_last()->text, "outside"));
	assert_string_equal(err_last()->fqn, "a");
	const char huge[] = META(KEY("a") TENSOR1("L9223372036854775807L\n", ""), "");
	T_ERR(LIMIT_EXCEEDED, dcp_meta_read(huge, sizeof huge - 1, &sd));
	assert_string_equal(err_last()->fqn, "a");
}

/* One list of chunks for many tensors would make many chunks out of few bytes. */
static void shared_lists_do_not_multiply(void **state)
{
	struct buf b CLEANUP(buf_free) = BUF_INIT(8 << 20);
	struct sdict *sd;
	(void)state;

	buf_puts(&b, META_HEAD KEY("state_dict_metadata") "(");
	static const char first[] = TENSOR1("K\x04", "");
	buf_puts(&b, KEY("a"));
	buf_put(&b, first, sizeof first - 1 - 4); /* without "(lub" */
	buf_puts(&b, "(");
	static const char one[] = CHUNK1("K\x00", "K\x00");
	for (int i = 0; i < 2000; i++) {
		buf_put(&b, one, sizeof one - 1);
		if (i == 0)
			buf_put(&b, "q\x07", 2);
		else
			buf_puts(&b, "0");
		if (i)
			buf_put(&b, "h\x07", 2);
	}
	buf_put(&b, "lq\x09ub", 5);
	for (int i = 0; i < 2000; i++) {
		buf_printf(&b, "Vt%d\nc" MOD "TensorStorageMetadata\n)", i);
		static const char rest[] = "\x81}(" KEY("properties") PROPS KEY("size") SIZE1("K\x04") KEY("chunks") "h\x09ub";
		buf_put(&b, rest, sizeof rest - 1);
	}
	buf_puts(&b, "d" KEY("storage_data") "(dub.");
	T_ERR(FORMAT_METADATA, dcp_meta_read(b.p, b.len, &sd));
}

static void out_of_memory_is_an_error(void **state)
{
	struct sdict *sd = sample(7), *again, *both;
	struct buf b;
	uint64_t nth = 1;
	(void)state;

	write_to(sd, &b);
	for (enum err e = ERR_NO_MEMORY; e; nth++) {
		mem_fail_at(nth);
		e = dcp_meta_read(b.p, b.len, &again);
		mem_fail_at(0);
		assert_true(e == OK || e == ERR_NO_MEMORY);
	}
	check_sample(again);
	struct sdict *parts[] = { sd, again };
	for (enum err e = ERR_NO_MEMORY; e; nth++) {
		mem_fail_at(nth % 100 + 1);
		e = dcp_meta_union(parts, 2, &both);
		mem_fail_at(0);
		assert_true(e == OK || e == ERR_NO_MEMORY);
	}
	sdict_free(both);
	sdict_free(again);
	sdict_free(sd);
	buf_free(&b);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(round_trip),
		cmocka_unit_test(truncation),
		cmocka_unit_test(damage),
		cmocka_unit_test(write_refuses_what_has_no_place),
		cmocka_unit_test(the_sinks_error_comes_back),
		cmocka_unit_test(unions),
		cmocka_unit_test(odd_but_legal),
		cmocka_unit_test(what_cannot_be),
		cmocka_unit_test(a_chunk_outside_or_too_large),
		cmocka_unit_test(shared_lists_do_not_multiply),
		cmocka_unit_test(out_of_memory_is_an_error),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
