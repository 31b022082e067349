/* sdops.c: the options of operations on state dicts in shared memory. */
#include "api/cli/request.h"
#include "spec/kinds.h"

bool sdops_is(const char *kind)
{
	enum job_kind k;

	return kind_parse(str_of(kind), &k) && kind_is(k, KIND_OPERATES);
}

FALLIBLE enum err sdops_fields(const struct args *a, json_t *doc)
{
	static const struct {
		const char *option, *key;
		bool value;
	} flags[] = { { "no-type-check", "type_check", false }, { "cpu-offload", "cpu_offload", true }, { "strict", "strict", true },
		      { "no-share-memory", "share_memory", false }, { "pin-memory", "pin_memory", true }, { "values", "values", true } };

	TRY(request_ranks(a, "group", doc, "group"));
	TRY(request_ranks(a, "ranks-only", doc, "ranks_only"));
	TRY(request_integer(a, "root", doc, "root"));
	TRY(request_text(a, "device", doc, "device"));
	TRY(request_text(a, "backend", doc, "backend"));
	for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
		if (args_flag(a, flags[i].option))
			TRY(request_set(doc, flags[i].key, json_boolean(flags[i].value)));
	return OK;
}
