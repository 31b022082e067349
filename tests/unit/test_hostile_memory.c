/* test_hostile_memory.c: no input makes a parser take many times the memory that the input itself has bytes. Each case is the dearest
 * input known for a parser. A child process parses it; its peak of resident memory (the input's bytes included) is compared with the
 * case's limit. HOSTILE_MEMORY_SHOW=1 prints the figures. */
#include "lib/t.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/num.h"
#include "format/dcp_meta.h"
#include "format/format.h"
#include "format/image.h"
#include "format/torch_item.h"
#include "format/zip.h"
#include "store/manifest.h"

#ifdef __SANITIZE_ADDRESS__
enum { MEASURED = 0, FULL_MIB = 8, MIB = 2 }; /* shadow memory and red zones would be measured */
#else
enum { MEASURED = 1, FULL_MIB = 80, MIB = 8 };
#endif

/* ---------------------------------------------------------------------------------------------------------- parsers */

static enum err parse_metadata(const void *bytes, size_t n)
{
	struct sdict *sd;

	return dcp_meta_read(bytes, n, &sd);
}

static enum err parse_manifest(const void *bytes, size_t n)
{
	struct manifest *m;

	return manifest_parse(bytes, n, &m);
}

static enum err parse_image(const void *bytes, size_t n)
{
	struct image *im;
	struct sdict *sd;

	TRY(image_parse(bytes, n, n, 0, &im));
	return image_collect(&im, 1, &sd);
}

/* A directory of safetensors in memory: `text` is its index, or its one file. A file that an index names has room for one tensor. */
struct directory {
	struct str text;
	bool is_index;
};

static enum err bytes_of(void *user, const char *name, uint64_t *out)
{
	const struct directory *d = user;

	(void)name;
	*out = d->is_index ? 64 : d->text.n;
	return OK;
}

static enum err read_at(void *user, const char *name, uint64_t offset, void *into, uint64_t n)
{
	const struct directory *d = user;

	(void)name;
	if (d->is_index)
		memset(into, 0, n);
	else
		memcpy(into, d->text.p + offset, n);
	return OK;
}

static enum err read_head(void *user, const char *name, uint64_t n, void **out)
{
	*out = mem_alloc(n);
	return read_at(user, name, 0, *out, n);
}

static enum err read_all(void *user, const char *name, void **out, uint64_t *n_out)
{
	const struct directory *d = user;

	(void)name;
	*n_out = d->text.n;
	*out = mem_alloc(d->text.n);
	memcpy(*out, d->text.p, d->text.n);
	return OK;
}

static enum err open_directory(struct directory d)
{
	const char *index = HF_INDEX, *file = "m.safetensors";
	struct format_source s = { &d, &index, &file, d.is_index, !d.is_index, read_all, read_at, read_head, bytes_of, NULL };
	struct sdict *sd;

	return format_open(FORMAT_SAFETENSORS, &s, &sd);
}

static enum err parse_index(const void *bytes, size_t n)
{
	return open_directory((struct directory){ { bytes, n }, true });
}

static enum err parse_file(const void *bytes, size_t n)
{
	return open_directory((struct directory){ { bytes, n }, false });
}

static enum err parse_value(const void *bytes, size_t n)
{
	struct str item = { bytes, n };
	struct item_source src = source_memory(&item);
	struct item_value v;

	return item_read_value(&src, &v);
}

static enum err parse_archive(const void *bytes, size_t n)
{
	struct str item = { bytes, n };
	struct item_source src = source_memory(&item);
	uint64_t checked, unknown;

	return item_check_crc(&src, true, &checked, &unknown);
}

/* ----------------------------------------------------------------------------------------------------------- inputs */

/* Repeats `unit` up to so many bytes; each # in it becomes the number of the repetition. */
static void repeat(struct buf *b, struct str unit, uint64_t bytes)
{
	for (unsigned i = 0; b->len < bytes; i++)
		for (size_t k = 0; k < unit.n; k++) {
			if (unit.p[k] == '#')
				buf_printf(b, "%08u", i);
			else
				buf_putc(b, (unsigned char)unit.p[k]);
		}
}

struct hostile {
	const char *name;
	enum err (*parse)(const void *bytes, size_t n);
	struct str begin, unit, end;
	uint32_t mib, limit_mib;         /* the input's size, and the limit */
	void (*wrap)(struct buf *b);     /* what holds the input; may be NULL */
};

static void as_image(struct buf *b)
{
	for (unsigned i = 0; i < 8; i++)
		b->p[i] = (unsigned char)((b->len - 8) >> (8 * i));
}

static void as_value(struct buf *b)
{
	struct buf item = BUF_INIT(2ull * FULL_MIB << 20);

	T_OK(item_put_value_pickle(&item, b->p, b->len));
	buf_free(b);
	*b = item;
}

/* An archive of as many empty records as fit: their local headers lie one behind the other, then the directory, then its end. */
static void as_archive(struct buf *b)
{
	static const char name[] = "a/";
	enum { LOCAL = 30 + sizeof name - 1, CENTRAL = 46 + sizeof name - 1 };
	uint64_t count = num_min(b->len / (LOCAL + CENTRAL), ZIP_RECORDS_MAX), from = count * LOCAL, bytes = count * CENTRAL;

	b->len = 0;
	buf_fill(b, 0, from);
	memcpy(b->p, "PK\3\4", 4);
	for (uint64_t i = 0; i < count; i++) {
		buf_put(b, "PK\1\2", 4);
		buf_fill(b, 0, 24);
		buf_le16(b, sizeof name - 1);
		buf_fill(b, 0, 12);
		buf_le32(b, (uint32_t)(i * LOCAL));
		buf_puts(b, name);
	}
	buf_put(b, "PK\6\6", 4);
	buf_le64(b, 44);
	buf_fill(b, 0, 12);
	buf_le64(b, count);
	buf_le64(b, count);
	buf_le64(b, bytes);
	buf_le64(b, from);
	buf_put(b, "PK\6\7\0\0\0", 8);
	buf_le64(b, from + bytes);
	buf_le32(b, 1);
	buf_put(b, "PK\5\6\0\0\0", 8);
	buf_fill(b, 0xff, 12);
	buf_le16(b, 0);
}

/* A parser's limit: a fixed part, and a multiple of the input's bytes beside the input itself. */
#define LIMIT(times) (72 + MIB + (times) * MIB)
#define LINEAR(times) (40 + MIB + (times) * MIB) /* without a pickle, whose objects may take a fixed amount first */
#define S(literal) { literal, sizeof(literal) - 1 }
#define MOD "torch.distributed.checkpoint.metadata\n"
#define META "c" MOD "Metadata\n)\x81}(Vstate_dict_metadata\n"
#define EIGHT "\0\0\0\0\0\0\0\0"

static const struct hostile cases[] = {
	{ "80 MiB of lists", parse_metadata, S(""), S("]"), S("."), FULL_MIB, 255, NULL },
	{ "lists in a stack", parse_metadata, S(""), S("]"), S("."), MIB, LIMIT(1), NULL },
	{ "lists in a list", parse_metadata, S("]"), S("]a"), S("."), MIB, LIMIT(1), NULL },
	{ "dicts in a list", parse_metadata, S("]"), S("}a"), S("."), MIB, LIMIT(1), NULL },
	{ "lists thrown away", parse_metadata, S("N"), S("]0"), S("."), MIB, LIMIT(1), NULL },
	{ "marks", parse_metadata, S("N"), S("("), S("N."), MIB, LIMIT(1), NULL },
	{ "tuples in tuples", parse_metadata, S("N"), S("\x85"), S("."), MIB, LIMIT(1), NULL },
	{ "frozen sets", parse_metadata, S("N"), S("(\x91"), S("."), MIB, LIMIT(1), NULL },
	{ "objects", parse_metadata, S("cm\nC\n"), S(")\x81"), S("."), MIB, LIMIT(1), NULL },
	{ "persistent ids", parse_metadata, S("N"), S("Q"), S("."), MIB, LIMIT(1), NULL },
	{ "copies", parse_metadata, S("N"), S("2"), S("."), MIB, LIMIT(1), NULL },
	{ "characters beyond ASCII", parse_metadata, S("N"), S("V\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\n0"),
	  S("."), MIB, LIMIT(1), NULL },
	{ "memo", parse_metadata, S("N"), S("p#\ng#\n0"), S("."), MIB, LIMIT(1), NULL },
	{ "tensors without chunks", parse_metadata,
	  S(META "(cm\nC\n0c" MOD "TensorStorageMetadata\n)\x81}(Vsize\nctorch\nSize\n)\x85RVchunks\n]Vproperties\n"
	    "c" MOD "TensorProperties\n)\x81(ctorch\nfloat32\nNI00\nNI00\ntbubq\x01" "0"), S("V#\nh\x01"),
	  S("dub."), MIB, LIMIT(7), NULL },
	{ "values without a place", parse_metadata, S(META "(c" MOD "BytesStorageMetadata\n)\x81q\x01" "0"), S("V#\nh\x01"),
	  S("dub."), MIB, LIMIT(7), NULL },
	{ "files of a manifest", parse_manifest, S("{\"files\":[{\"name\":\"x\"}"), S(",{\"name\":\"#\"}"),
	  S("]}"), MIB, LINEAR(6), NULL },
	{ "items of a manifest", parse_manifest,
	  S("{\"files\":[{\"name\":\"x\",\"items\":[[0,0,\"00000000\",\"00000000000000000000000000000000\"]"),
	  S(",[0,0,\"00000000\",\"00000000000000000000000000000000\"]"), S("]}]}"), MIB, LINEAR(7), NULL },
	{ "files without names", parse_manifest, S("{\"files\":[{}"), S(",{}"), S("]}"), MIB, LINEAR(1), NULL },
	{ "blocks of a manifest", parse_manifest,
	  S("{\"files\":[{\"name\":\"x\",\"items\":[[0,0,\"00000000\",\"00000000000000000000000000000000\",[0,"
	  "\"00000000000000000000000000000000\""), S(",0,\"00000000000000000000000000000000\""), S("]]]}]}"), MIB, LINEAR(7), NULL },
	{ "tensors of a header", parse_image, S(EIGHT "{\"x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}"),
	  S(",\"#\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}"), S("}"), MIB, LINEAR(10), as_image },
	{ "dims of a header", parse_image, S(EIGHT "{\"x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}"),
	  S(",\"#\":{\"dtype\":\"U8\",\"shape\":[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0],"
	    "\"data_offsets\":[0,0]}"), S("}"), MIB, LINEAR(10), as_image },
	{ "texts of a header", parse_image, S(EIGHT "{\"__metadata__\":{\"x\":\"\""), S(",\"#\":\"\""),
	  S("}}"), MIB, LINEAR(7), as_image },
	{ "texts of a file's header", parse_file, S(EIGHT "{\"__metadata__\":{\"x\":\"\""), S(",\"#\":\"\""),
	  S("}}"), MIB, LINEAR(1), as_image },
	{ "names of a file's header", parse_file, S(EIGHT "{\"x\":0"), S(",\"\":0"), S("}"), MIB, LINEAR(1), as_image },
	{ "tensors of a file's header", parse_file, S(EIGHT "{\"x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}"),
	  S(",\"#\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}"), S("}"), MIB, LINEAR(10), as_image },
	{ "tensors of an index", parse_index, S("{\"weight_map\":{\"x\":\"m\""), S(",\"#\":\"m\""), S("}}"), MIB, LINEAR(1), NULL },
	{ "files of an index", parse_index, S("{\"weight_map\":{\"x\":\"m\""), S(",\"#\":\"#\""), S("}}"), MIB, LINEAR(10), NULL },
	{ "values of an image", parse_image,
	  S(EIGHT "{\"__metadata__\":{\"dcpd\":\"{\\\"version\\\":1,\\\"values\\\":{\\\"x\\\":{\\\"json\\\":1}"),
	  S(",\\\"#\\\":{\\\"json\\\":1}"), S("}}\"}}"), MIB, LINEAR(23), as_image },
	{ "paths of an image", parse_image, S(EIGHT "{\"__metadata__\":{\"dcpd\":\"{\\\"version\\\":1,\\\"paths\\\":{\\\"x\\\":[0"),
	  S(",0"), S("]}}\"}}"), MIB, LINEAR(7), as_image },
	{ "a value of lists", parse_value, S(""), S("]"), S("."), MIB, LIMIT(7), as_value },
	{ "a value of nothings", parse_value, S("]("), S("N"), S("e."), MIB, LIMIT(7), as_value },
	{ "a value of one string", parse_value, S("](Vtwenty bytes of text\nq\x01"), S("h\x01"), S("e."), MIB, LIMIT(7), as_value },
	{ "records of an archive", parse_archive, S(""), S(" "), S(""), MIB, LINEAR(7), as_archive },
};

static int run(const struct hostile *h)
{
	struct buf b = BUF_INIT(2ull * FULL_MIB << 20);

	buf_put(&b, h->begin.p, h->begin.n);
	repeat(&b, h->unit, (uint64_t)h->mib << 20);
	buf_put(&b, h->end.p, h->end.n);
	if (h->wrap)
		h->wrap(&b);
	enum err e = h->parse(b.p, b.len);
	if (getenv("HOSTILE_MEMORY_SHOW"))
		printf("%-26s %s%s%s\n", h->name, e ? err_code_name(e) : "ok", e ? ": " : "", e ? err_last()->text : "");
	fflush(stdout);
	_exit(0);
}

static void peak_is_bounded(void **state)
{
	bool show = getenv("HOSTILE_MEMORY_SHOW") != NULL, good = true;
	struct rusage used;
	int status;

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		fflush(stdout);
		pid_t child = fork();
		if (child == 0)
			run(&cases[i]);
		assert_int_equal(wait4(child, &status, 0, &used), child);
		assert_int_equal(status, 0);
		uint64_t mib = (uint64_t)used.ru_maxrss >> 10;
		if (show)
			printf("%-26s %4ju MiB (%.1f times its bytes), at most %ju\n", cases[i].name, (uintmax_t)mib,
			       (double)mib / cases[i].mib, (uintmax_t)cases[i].limit_mib);
		if (MEASURED && mib > cases[i].limit_mib) {
			print_error("%s: %ju MiB, at most %ju are allowed\n", cases[i].name, (uintmax_t)mib,
				    (uintmax_t)cases[i].limit_mib);
			good = false;
		}
	}
	assert_true(good);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(peak_is_bounded),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
