/* exec_copy.c: tasks that copy a piece of a file as it is (RUN_COPY_FILES): read, compared while it is in the CPU's cache, written.
 *
 * A digest that begins in an earlier piece, and the two ends of an archive around a large payload, are compared by the piece that has their
 * last byte: it reads the rest of them again from the source. */
#include <string.h>

#include "base/mem.h"
#include "base/num.h"
#include "io/digest.h"
#include "runner/exec_impl.h"

enum { PAGE = 4096 };

static const struct run_copy *copy_of(const struct slot *s)
{
	const struct run *run = s->x->run;

	return &run->copies[run->tasks[s->task].first];
}

enum err exec_copy_begin(struct slot *s)
{
	const struct run_copy *c = copy_of(s);
	uint32_t read;
	bool full;

	s->phase = SLOT_FETCH;
	wave_begin(&s->wave, s->in, s->x->in_bytes);
	TRY(wave_add(&s->wave, s->x->run->srcs[c->src].file, c->offset, c->bytes, s->in, &read, &full));
	must(!full);
	return exec_queue_wave(s);
}

/* ---- comparing ---- */

/* Adds bytes of the source to a digest: from the piece, or read again if they lie outside. */
static FALLIBLE enum err add_bytes(struct slot *s, const struct run_copy *c, uint64_t at, uint64_t n, struct digest_stream *d)
{
	while (n > 0) {
		bool inside = at >= c->offset && at < c->offset + c->bytes;
		uint64_t part = num_min(n, inside ? c->offset + c->bytes - at : EXEC_COPY_AGAIN);
		if (!inside && at < c->offset)
			part = num_min(part, c->offset - at);
		if (inside) {
			digest_add(d, s->in + (at - c->offset), part);
		} else {
			TRY(sources_read(&s->x->sources, c->src, at, s->out, part));
			digest_add(d, s->out, part);
		}
		at += part;
		n -= part;
	}
	return OK;
}

static FALLIBLE enum err compare(struct slot *s, const struct run_copy *c, const struct run_check *check)
{
	char want[33], got[33], room[ERR_FILE_MAX];
	const struct run *run = s->x->run;
	struct digest_stream stream;
	struct digest digest;

	digest_begin_one(&stream, DIGEST_XXH3);
	TRY(add_bytes(s, c, check->at[0], check->bytes[0], &stream));
	TRY(add_bytes(s, c, check->at[1], check->bytes[1], &stream));
	digest_end(&stream, &digest);
	if (memcmp(digest.xxh3_128, check->xxh3_128, sizeof check->xxh3_128) == 0) {
		atomic_fetch_add(&run->head->verified_bytes, check->bytes[0] + check->bytes[1]);
		return OK;
	}
	digest_hex(check->xxh3_128, want);
	digest_hex(digest.xxh3_128, got);
	bool second = check->bytes[0] == 0;
	uint64_t at = check->at[second], end = at + check->bytes[second];
	enum err e = ERR(DIGEST_MISMATCH, "bytes %ju to %ju%s are not those written", (uintmax_t)at, (uintmax_t)end,
			 check->bytes[1] ? ", or the archive behind the payload," : "");
	return err_at_file(err_expected(e, want, got), run_file_label(run, run->srcs[c->src].file, room), (int64_t)at);
}

/* Zeros between items prove themselves; anything else there is no part of the checkpoint, and is copied and counted. */
static FALLIBLE enum err check_piece(struct slot *s, const struct run_copy *c)
{
	struct run *run = s->x->run;

	each(check, run->checks + c->first_check, c->check_count) {
		if (check->kind == RUN_CHECK_DIGEST)
			TRY(compare(s, c, check));
		else if (check->kind == RUN_CHECK_ZEROS && mem_is_zero(s->in + (check->at[0] - c->offset), check->bytes[0]))
			atomic_fetch_add(&run->head->verified_bytes, check->bytes[0]);
		else
			atomic_fetch_add(&run->srcs[c->src].unverified, check->bytes[0]);
	}
	return OK;
}

/* ---- writing ---- */

static FALLIBLE enum err write_piece(struct slot *s)
{
	const struct run_copy *c = copy_of(s);
	uint64_t bytes = (c->bytes + PAGE - 1) & ~(uint64_t)(PAGE - 1);

	TRY(check_piece(s, c));
	memset(s->in + c->bytes, 0, bytes - c->bytes); /* what O_DIRECT writes behind the file's end, and cuts off */
	s->writes.n = 0;
	TRY(vec_reserve(&s->writes, 1));
	s->phase = SLOT_WRITE;
	return exec_push_write(s, c->to, s->in, s->x->run->files[c->to].direct ? bytes : c->bytes, c->offset);
}

static FALLIBLE enum err written(struct slot *s)
{
	const struct run_copy *c = copy_of(s);
	struct run *run = s->x->run;

	atomic_fetch_add(&run->ranks[run->tasks[s->task].rank_index].bytes_done, c->bytes);
	s->sync.n = 0;
	TRY(exec_count_file(s, c->to));
	return exec_end_files(s);
}

enum err exec_copy_advance(struct slot *s)
{
	switch (s->phase) {
	case SLOT_FETCH:
		return write_piece(s);
	case SLOT_WRITE:
		return written(s);
	default:
		s->phase = SLOT_IDLE;
		return OK;
	}
}
