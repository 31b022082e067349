/* companions.c: see companions.h. */
#include "plan/companions.h"

#include "base/num.h"

static const struct {
	const char *main, *companion;  /* endings: the rest of both names is the same */
} rows[] = {
	{ "", "_scale_inv" },                        /* fp8 in blocks */
	{ "weight", "weight_scale" }, { "weight", "weight_scale_2" }, { "weight", "weight_zero_point" },
	{ "weight", "weight_global_scale" },
	{ "weight_packed", "weight_scale" }, { "weight_packed", "weight_zero_point" }, { "weight_packed", "weight_shape" },
	{ "weight_packed", "weight_g_idx" }, { "weight_packed", "weight_global_scale" },
	{ "weight", "weight.absmax" }, { "weight", "weight.quant_map" }, { "weight", "weight.nested_absmax" },
	{ "weight", "weight.nested_quant_map" }, { "weight", "weight.quant_state.bitsandbytes__nf4" },
	{ "weight", "weight.quant_state.bitsandbytes__fp4" }, { "weight", "SCB" }, { "weight", "weight_format" },
	{ "qweight", "qzeros" }, { "qweight", "scales" }, { "qweight", "g_idx" },
	{ "_blocks", "_scales" },                    /* mxfp4 */
};

bool companions_dtype(enum dtype d)
{
	return (dtype_bytes(d) == 1 && d != DT_BOOL) || d == DT_INT32;
}

/* main with its ending exchanged for that of row `i`. */
static bool name_of(uint32_t i, struct str main, char room[COMPANION_NAME_MAX], struct str *out)
{
	size_t ending = strlen(rows[i].main), more = strlen(rows[i].companion), stem = main.n - ending;

	if (!str_ends(main, rows[i].main) || stem + more > COMPANION_NAME_MAX)
		return false;
	memcpy(room, main.p, stem);
	memcpy(room + stem, rows[i].companion, more);
	*out = (struct str){ room, stem + more };
	return true;
}

bool companions_next(struct companions *c, struct str *name_out)
{
	while (c->next < sizeof rows / sizeof *rows)
		if (name_of(c->next++, c->main, c->name, name_out))
			return true;
	return false;
}

bool companions_follow(const struct companions *c, struct str main, char room[COMPANION_NAME_MAX], struct str *name_out)
{
	return name_of(c->next - 1, main, room, name_out);
}

enum err companions_no_cast(struct str name)
{
	return ERR(DTYPE_UNSUPPORTED, "the weight is quantised (%.*s): a cast would change its values; "
		   "dequantise it first", (int)num_min(name.n, 300), name.p);
}
