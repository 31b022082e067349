/* lookup_images.c: tells which of the question's segments are no valid images, by reading their headers as a save does. */
#include "query/lookup.h"
#include "runner/input.h"

enum err lookup_images(struct worker *, const json_t *q, const int *fds, uint32_t fd_count, struct buf *out)
{
	CLEANUP(rank_segments_free) struct rank_segments s;
	const char *comma = "";

	TRY(rank_segments_read(q, 0, fd_count, &s));
	buf_puts(out, "{\"bad\":[");
	for (uint32_t i = 0; i < s.count; i++) {
		struct image *image = NULL;
		enum err e = input_read_image(&s.v[i], fds, &image);
		image_free(image);
		if (e == ERR_NO_MEMORY)
			return e;
		if (!e)
			continue;
		buf_puts(out, comma);
		buf_printf(out, "{\"at\":%u,\"problem\":", i);
		job_problem_put(out, err_at_rank(e, s.v[i].rank));
		buf_puts(out, "}");
		comma = ",";
	}
	buf_puts(out, "]}");
	return buf_status(out);
}
