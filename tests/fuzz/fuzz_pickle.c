/* fuzz_pickle.c: any bytes as a pickle; then every accessor on every node that can be reached. */
#include "format/pickle.h"

#include "base/err.h"

struct walk {
	const struct pickle *pk;
	uint64_t budget, sum;
};

static void look(struct walk *w, pnode n)
{
	const struct pickle *pk = w->pk;
	char name[128];
	int64_t i;
	double re, im;
	bool decimal;
	struct str s[] = { pickle_str(pk, n), pickle_bytes(pk, n), pickle_bigint(pk, n, &decimal), pickle_module(pk, n),
			   pickle_name(pk, n) };

	for (size_t k = 0; k < sizeof s / sizeof *s; k++)
		for (size_t at = 0; at < s[k].n && at < 4096; at++)
			w->sum += (unsigned char)s[k].p[at];
	w->sum += pickle_is_true(pk, n) + pickle_int(pk, n, &i) + pickle_float(pk, n, &re) +
		  pickle_complex(pk, n, &re, &im) + pickle_record_id(pk, n) + pickle_dict_get(pk, n, "x") +
		  pickle_is_call(pk, n, "a", "b");
	must(pickle_class_name(pk, n, name, sizeof name)[0]);
	if (pickle_kind(pk, n) == PK_STR)
		must(pickle_utf8(pickle_str(pk, n)));
}

static void walk(struct walk *w, pnode n, unsigned depth)
{
	const struct pickle *pk = w->pk;
	struct pickle_iter it = pickle_iter(pk, n);
	pnode item;
	uint64_t items = 0;

	if (depth == PICKLE_DEPTH_MAX || w->budget == 0)
		return;
	w->budget--;
	look(w, n);
	while (pickle_next(pk, &it, &item)) {
		walk(w, item, depth + 1);
		items++;
	}
	if (pickle_kind(pk, n) == PK_TUPLE || pickle_kind(pk, n) == PK_SIZE)
		must(items == pickle_count(pk, n) && pickle_at(pk, n, items) == 0);
	walk(w, pickle_args(pk, n), depth + 1);
	walk(w, pickle_state(pk, n), depth + 1);
	for (uint32_t i = 0; i < PICKLE_FIELDS_MAX; i++)
		if (pickle_field(pk, n, i))
			walk(w, pickle_field(pk, n, i), depth + 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const struct pickle_record records[] = {
		{ "m", "R", 1, 2, { "a", "b" } },
		{ "torch.distributed.checkpoint.metadata", "ChunkStorageMetadata", 2, 2, { "offsets", "sizes" } },
		{ NULL, NULL, 0, 0, { NULL } },
	};
	struct pickle *pk;

	if (pickle_parse(data, size, records, &pk) != OK) {
		must(err_last()->offset <= (int64_t)size);
		return 0;
	}
	struct walk w = { pk, 20000, 0 };
	must(pickle_kind(pk, pickle_root(pk)) != PK_ABSENT);
	must(pickle_consumed(pk) <= size && pickle_memory(pk) <= 80 * size + (64 << 10));
	walk(&w, pickle_root(pk), 0);
	pickle_free(pk);
	return w.sum == UINT64_MAX;
}
