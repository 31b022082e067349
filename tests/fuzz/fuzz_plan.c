/* fuzz_plan.c: bytes → small tensors and chunks → validation and read plans, held against brute force over every
 * element; then layouts and save plans of the same, which must end in a plan that validates or in an error. */
#include "lib/plan_cases.h"
#include "plan/layout.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void try_layout(struct dice *d, const struct boxes *b)
{
	struct layout_box boxes[CASE_CHUNKS];
	struct placement p[2];
	const int64_t mesh[2] = { roll(d, 5), roll(d, 4) };
	uint32_t ranks[CASE_CHUNKS], t, matched;
	struct layout_rule r = { .match = STR("w*"), .kind = (enum layout_kind)roll(d, 3), .chunk_dim = (int32_t)roll(d, 7) - 3,
				 .mesh = mesh, .mesh_ndim = (uint32_t)roll(d, 3), .placements = p, .boxes = boxes,
				 .box_count = b->count };
	struct layout l = { &r, 1, (uint32_t)roll(d, 17) };
	struct sdict *sd = NULL, *plan = NULL;
	struct save_plan_stats stats;

	r.placement_count = r.mesh_ndim ? r.mesh_ndim : 1;
	for (int i = 0; i < 2; i++)
		p[i] = (struct placement){ .kind = (enum placement_kind)roll(d, 4), .dim = (int32_t)roll(d, 7) - 3,
					    .split_factor = roll(d, 5) };
	for (uint32_t i = 0; i < b->count; i++)
		boxes[i] = (struct layout_box){ (uint32_t)roll(d, 4), b->ndim, b->dims[i] };
	if (roll(d, 3) == 0 || r.kind == LAYOUT_CHUNKS) {
		r.rank_count = (uint32_t)roll(d, 9);
		r.ranks = ranks;
		for (uint32_t i = 0; i < r.rank_count; i++)
			ranks[i] = (uint32_t)roll(d, 17);
	}
	CASE_CHECK(sdict_new(1 << 20, &sd) == OK);
	CASE_CHECK(sdict_add_tensor(sd, STR("w"), DT_INT16, b->ndim, b->shape, &t) == OK);
	if (layout_check(&l) == OK && layout_apply(&l, sd, t, &matched) == OK) {
		CASE_CHECK(save_plan_make(sd, DEDUP_BALANCED, 1 << 20, &plan, &stats) == OK);
		CASE_CHECK(save_plan_validate(plan) == OK); /* a layout that was accepted tiles the tensor */
		CASE_CHECK(stats.bytes_total == 2ull * case_numel(b));
	}
	sdict_free(sd);
	sdict_free(plan);
}

static void try_placement(struct dice *d)
{
	struct placement p;

	if (d->left && placement_parse((struct str){ (const char *)d->bytes, d->left < 80 ? d->left : 80 }, &p) == OK)
		CASE_CHECK(p.kind <= PLACE_PARTIAL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct dice d = { .bytes = data, .left = size };
	struct boxes from, to;

	case_shape(&d, &from);
	to = from;
	case_tile(&d, &from);
	case_tile(&d, &to);
	case_spoil(&d, &from, roll(&d, 2) == 0);
	if (roll(&d, 2))
		case_spoil(&d, &to, roll(&d, 2) == 0);
	case_plan(&from);
	case_load(&from, &to);
	try_layout(&d, &from);
	try_placement(&d);
	return 0;
}
