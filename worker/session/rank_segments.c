/* rank_segments.c: see rank_segments.h. */
#include "session/rank_segments.h"

#include "base/mem.h"

static uint64_t number(const json_t *one, const char *name)
{
	return (uint64_t)json_integer_value(json_object_get(one, name));
}

enum err rank_segments_read(const json_t *entry, uint32_t first_fd, uint32_t fd_count, struct rank_segments *out)
{
	const json_t *ranks = json_object_get(entry, "ranks"), *one;
	size_t i;

	*out = (struct rank_segments){ .count = (uint32_t)json_array_size(ranks), .world_size = (uint32_t)number(entry, "world_size"),
				       .generation = number(entry, "generation") };
	out->v = mem_zalloc((uint64_t)out->count + 1, sizeof *out->v);
	NEED(out->v, "no memory for %u ranks", out->count);
	json_array_foreach(ranks, i, one) {
		const char *name = json_string_value(json_object_get(one, "segment"));
		uint64_t fd = number(one, "fd"), bytes = number(one, "bytes"), image_bytes = number(one, "image_bytes");
		if (fd >= fd_count)
			return ERR(PROTOCOL, "rank %ju has no descriptor", (uintmax_t)number(one, "rank"));
		const json_t *ring = json_object_get(one, "ring");
		out->v[i] = (struct rank_segment){ (uint32_t)number(one, "rank"), first_fd + (uint32_t)fd, name ? name : "segment", bytes,
						   image_bytes ? image_bytes : bytes, json_is_true(json_object_get(one, "filling")),
						   number(ring, "offset"), number(ring, "bytes") };
	}
	return OK;
}

void rank_segments_free(struct rank_segments *s)
{
	mem_free(s->v);
	*s = (struct rank_segments){ 0 };
}
