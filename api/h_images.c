/* h_images.c: a sealed generation as bytes: each rank's image is a safetensors file that any client reads, whole or by ranges, and its
 * digests say whether what came is what lies there. The image goes out of the segment's descriptor: nothing of it is held here. */
#include <fcntl.h>
#include <stdio.h>

#include "api/h_common.h"
#include "api/handlers.h"
#include "api/range.h"
#include "server/parts.h"
#include "server/state_dict.h"

/* A client has this long, and so much more for each MiB: the slot waits for it. */
enum { SEND_MS = 30000, SEND_MS_A_MIB = 1000, WAIT_MAX_S = 60 };

static void set_time(struct req *r, uint64_t bytes)
{
	r->send_ms = SEND_MS + (int64_t)(bytes >> 20) * SEND_MS_A_MIB;
}

static FALLIBLE enum err begin(struct req *r)
{
	struct state_dict_reader reader = { .who = req_principal(r), .name = r->parts[2], .lingers = r->caller.is_node };
	uint64_t generation = UINT64_MAX;

	TRY(req_query_u64(r, "generation", INT64_MAX, &generation));
	reader.generation = generation == UINT64_MAX ? -1 : (int64_t)generation;
	return state_dict_read_begin(r->core->state_dicts, &reader, &r->reading);
}

static FALLIBLE enum err tell_generation(struct req *r, const struct state_dict_image *image)
{
	char text[24];

	snprintf(text, sizeof text, "%jd", (intmax_t)image->generation);
	return req_header(r, "Dcpd-Generation", text);
}

FALLIBLE enum err h_rank_image(struct req *r)
{
	struct state_dict_image image;
	int64_t rank = 0;

	TRY(h_rank(r, &rank));
	TRY(begin(r));
	TRY(state_dict_read_image(r->reading, rank, &image));
	const char *wish = req_head(r, MHD_HTTP_HEADER_RANGE), *only_if = req_head(r, MHD_HTTP_HEADER_IF_RANGE);
	struct range range = { 0, image.bytes };
	bool part = wish && (!only_if || strcmp(only_if, image.etag) == 0) && range_read(wish, image.bytes, &range);
	set_time(r, part ? range.bytes : image.bytes);
	TRY(req_fd(r, "application/x-safetensors", image.fd, image.bytes, 0, image.etag));
	return tell_generation(r, &image);
}

/* `Prefer: wait=SECONDS` (RFC 7240): the caller would rather hear that they are being computed, and ask again. -1: it waits. */
static int64_t prefers_wait(struct req *r)
{
	static const char word[] = "wait=";
	const char *wish = req_head(r, "Prefer");
	uint64_t s;

	if (!wish || strncmp(wish, word, sizeof word - 1) != 0 || !str_to_u64(str_of(wish + sizeof word - 1), &s) || s > WAIT_MAX_S)
		return -1;
	return (int64_t)s * 1000;
}

static FALLIBLE enum err answer_digests(struct req *r, const struct state_dict_image *digests)
{
	int fd = fcntl(digests->fd, F_DUPFD_CLOEXEC, 0);

	if (fd < 0)
		return ERR_SYS(SYSTEM, "cannot send digests");
	set_time(r, digests->bytes);
	TRY(req_fd(r, "application/json", fd, digests->bytes, 0, digests->etag));
	return tell_generation(r, digests);
}

static FALLIBLE enum err answer_later(struct req *r)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(64);

	err_clear();
	buf_puts(&b, "{}");
	return req_json(r, 202, &b);
}

static void on_digests(void *user, enum err e, const struct state_dict_image *digests)
{
	if (e == ERR_TIMED_OUT && !digests && prefers_wait(user) >= 0)
		req_done(user, answer_later(user));
	else
		req_done(user, e ? e : answer_digests(user, digests));
}

FALLIBLE enum err h_sdict_digests(struct req *r)
{
	struct str of = { 0 };
	bool given;

	TRY(req_query(r, "of", &of, &given));
	if (given && !str_is(of, "headers"))
		return ERR(VALIDATION_FAILED, "\"of\" is \"headers\", or is left out: then the digests of all bytes are sent");
	TRY(begin(r));
	req_hold(r);
	state_dict_read_digests(r->reading, given, prefers_wait(r), on_digests, r);
	return OK;
}
