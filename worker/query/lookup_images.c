/* lookup_images.c: tells which of the question's segments are no valid images, by reading their headers as a save does. */
#include "query/lookup.h"
#include "runner/input.h"

enum err lookup_images(const json_t *q, const int *fds, uint32_t fd_count, struct buf *out)
{
	const json_t *rank;
	const char *comma = "";
	size_t i;

	buf_puts(out, "{\"bad\":[");
	json_array_foreach(json_object_get(q, "ranks"), i, rank) {
		struct image *image = NULL;
		enum err e = input_read_image(rank, fds, fd_count, &image);
		image_free(image);
		if (e == ERR_NO_MEMORY)
			return e;
		if (!e)
			continue;
		buf_puts(out, comma);
		buf_printf(out, "{\"at\":%zu,\"problem\":", i);
		job_problem_put(out, err_at_rank(e, json_integer_value(json_object_get(rank, "rank"))));
		buf_puts(out, "}");
		comma = ",";
	}
	buf_puts(out, "]}");
	return buf_status(out);
}
