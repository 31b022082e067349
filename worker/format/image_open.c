/* image_open.c: a folder of segment images, one file per rank, as a source: what a live state dict looks like from another node, or as
 * somebody has fetched it (api/image.md). Each file is the image of its rank, byte for byte; all of them together are the state dict. */
#include <string.h>

#include "format/format.h"
#include "format/image.h"

struct opening {
	const struct format_source *s;
	struct image **images;
	uint32_t count;
};

static FALLIBLE enum err read_image(struct opening *o, uint32_t rank)
{
	const struct format_source *s = o->s;
	const char *name = s->payload[rank];
	CLEANUP(mem_free_ptr) void *header = NULL;
	unsigned char first[8];
	uint64_t bytes, n;

	TRY(s->bytes_of(s->user, name, &bytes));
	if (bytes < sizeof first)
		return ERR(FORMAT_IMAGE, "an image of %ju bytes", (uintmax_t)bytes);
	TRY(s->read(s->user, name, 0, first, sizeof first));
	TRY(sft_header_bytes(first, bytes, &n));
	TRY(s->read_head(s->user, name, sizeof first + n, &header));
	if (memcmp(header, first, sizeof first) != 0)
		return ERR(FORMAT_IMAGE, "the header changes while it is read");
	return image_parse(header, sizeof first + n, bytes, rank, &o->images[rank]);
}

/* Payload files come sorted by rank. */
static FALLIBLE enum err read_all(struct opening *o)
{
	struct format_image_name is;

	for (uint32_t r = 0; r < o->count; r++) {
		if (!format_image_name(o->s->payload[r], &is))
			return ERR(INTERNAL, "a file that is no image");
		if (is.rank != r || is.world_size != o->count)
			return err_at_file(ERR(CHECKPOINT_INCOMPLETE, "the image of rank %u of %ju is missing, or there are images of "
					       "several state dicts", r, (uintmax_t)is.world_size), o->s->payload[r], -1);
		TRY(err_at_file(read_image(o, r), o->s->payload[r], -1));
	}
	return OK;
}

static FALLIBLE enum err name_files(const struct opening *o, struct sdict *sd)
{
	for (uint32_t r = 0; r < o->count; r++)
		TRY(arena_str(sd->arena, str_of(o->s->payload[r]), &sd->files[r].name));
	return OK;
}

enum err format_open_image(const struct format_source *s, struct arena *scratch, struct sdict **out)
{
	struct opening o = { .s = s, .count = (uint32_t)s->payload_count };

	(void)scratch;
	o.images = mem_zalloc(s->payload_count + 1, sizeof *o.images);
	NEED(o.images, "no memory for %ju images", (uintmax_t)s->payload_count);
	enum err e = s->payload_count <= FORMAT_RANKS_MAX ? read_all(&o) : ERR(LIMIT_EXCEEDED, "%ju images", (uintmax_t)s->payload_count);
	e = e ?: image_collect(o.images, o.count, out);
	e = e ?: name_files(&o, *out);
	for (uint32_t r = 0; r < o.count; r++)
		image_free(o.images[r]);
	mem_free(o.images);
	return e;
}
