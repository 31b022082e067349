/* exec_stream.c: tasks that read a tensor from its first byte to its last: for a delta, and to apply one.
 *
 *   base ──┐
 *          ├─ block by block ──► digests ──► encoder ──► out         (delta)
 *   now ───┘
 *   base ──┬─ block by block ──► digests ──► decoder ──► out         (apply)
 *   frame ─┘
 *
 * A zstd frame has no places to begin at, so that one worker does all of a tensor; several tensors are on their way at once. */
#include <string.h>
#include <zlib.h>

#include "base/num.h"
#include "format/delta_code.h"
#include "runner/exec_impl.h"

enum { ENCODER_BYTES = 4 << 20, DECODER_BYTES = DELTA_CURSORS * (9 << 20) };

struct slot_stream {
	uint64_t next;                 /* of the task: the stream after this one */
	struct run_stream *row;
	unsigned char *base, *now, *out;       /* of the slot's `out`: a task's bytes, the same, twice as many */
	uint64_t at, n;                /* the block */
	unsigned pass, passes;
	uint64_t written;
	uint32_t want[DELTA_CURSORS];  /* bytes of the frame that are being read */
	bool decoded, ended;           /* the block; the encoder's frame */
	struct delta_out to;
	struct digest_stream base_digest, now_digest;
	struct delta_encoder *encoder;
	struct delta_decoder decoder;
};

static bool has_kind(const struct run *run, enum run_stream_kind kind)
{
	for (uint64_t i = 0; i < run->streams_n; i++)
		if (run->streams[i].kind == kind)
			return true;
	return false;
}

uint64_t exec_stream_memory(const struct run *run)
{
	return (has_kind(run, RUN_STREAM_ENCODE) ? ENCODER_BYTES : 0) + (has_kind(run, RUN_STREAM_DECODE) ? DECODER_BYTES : 0);
}

void exec_stream_close(struct slot *s)
{
	if (!s->stream)
		return;
	delta_encoder_free(s->stream->encoder);
	delta_decoder_free(&s->stream->decoder);
	mem_free(s->stream);
}

static FALLIBLE enum err open_stream(struct slot *s)
{
	const struct run *run = s->x->run;
	uint64_t task = run->head->opts.task_bytes;

	if (s->stream)
		return OK;
	s->stream = mem_zalloc(1, sizeof *s->stream);
	NEED(s->stream, "no memory for a stream");
	s->stream->base = s->out;
	s->stream->now = s->out + task;
	s->stream->out = s->out + 2 * task;
	if (has_kind(run, RUN_STREAM_ENCODE))
		TRY(delta_encoder_new(&s->stream->encoder));
	return has_kind(run, RUN_STREAM_DECODE) ? delta_decoder_open(&s->stream->decoder) : OK;
}

/* ------------------------------------------------------------------------------------------------------- reading */

static bool decodes(const struct slot_stream *t)
{
	return t->row->kind == RUN_STREAM_DECODE;
}

static FALLIBLE enum err begin_block(struct slot *s)
{
	struct slot_stream *t = s->stream;

	t->n = num_min(s->x->run->head->opts.task_bytes, t->row->bytes - t->at);
	t->decoded = false;
	read_plan_begin(&s->reads);
	if (t->n)
		TRY(read_plan_add(&s->reads, t->row->base, t->at, t->at + t->n, t->base));
	if (t->n && t->row->kind == RUN_STREAM_ENCODE)
		TRY(read_plan_add(&s->reads, t->row->now, t->at, t->at + t->n, t->now));
	s->phase = SLOT_FETCH;
	return OK;
}

static FALLIBLE enum err begin_pass(struct slot *s, unsigned pass)
{
	struct slot_stream *t = s->stream;

	t->pass = pass;
	t->at = 0;
	return begin_block(s);
}

static FALLIBLE enum err begin_stream(struct slot *s)
{
	struct slot_stream *t = s->stream;
	struct run_stream *row = &s->x->run->streams[t->next++];

	t->row = row;
	t->written = 0;
	t->ended = false;
	t->passes = 1;
	t->to = (struct delta_out){ t->out, 0, 2 * (size_t)s->x->run->head->opts.task_bytes };
	digest_begin_one(&t->base_digest, DIGEST_XXH3);
	digest_begin_one(&t->now_digest, decodes(t) ? DIGEST_BOTH : DIGEST_XXH3);
	if (row->kind == RUN_STREAM_ENCODE && row->encoding == DELTA_XOR)
		TRY(delta_encode_begin(t->encoder, DELTA_XOR, row->bytes, 0));
	if (decodes(t))
		delta_decode_begin(&t->decoder, (enum delta_encoding)row->encoding, row->bytes, row->blob_bytes);
	row->checksum32 = 1; /* of no bytes */
	return begin_pass(s, 0);
}

enum err exec_stream_begin(struct slot *s)
{
	TRY(open_stream(s));
	s->stream->next = s->x->run->tasks[s->task].first;
	return begin_stream(s);
}

static enum err fill(struct slot *s)
{
	wave_begin(&s->wave, s->in, s->x->in_bytes);
	struct slot_stream *t = s->stream;
	struct delta_decoder *d = &t->decoder;
	uint32_t read;
	bool full;
	for (unsigned i = 0; i < DELTA_CURSORS; i++) {
		t->want[i] = decodes(t) ? (uint32_t)delta_wants(d, i) : 0;
		if (!t->want[i])
			continue;
		TRY(wave_add(&s->wave, t->row->blob_file, t->row->blob_at + d->cursors[i].taken, t->want[i], d->cursors[i].input, &read,
			     &full));
		must(!full);
	}
	return read_plan_fill(&s->reads, &s->wave);
}

static enum err copy(struct slot *s)
{
	struct slot_stream *t = s->stream;

	for (unsigned i = 0; i < DELTA_CURSORS; i++) {
		if (t->want[i])
			delta_took(&t->decoder, i, t->want[i]);
		t->want[i] = 0;
	}
	return read_plan_copy(&s->reads, &s->wave);
}

/* ------------------------------------------------------------------------------------------------------- writing */

static FALLIBLE enum err write_out(struct slot *s, unsigned char *p, size_t n)
{
	struct slot_stream *t = s->stream;
	struct wave_op *op;

	s->writes.n = 0;
	TRY(vec_reserve(&s->writes, 1));
	TRY(vec_push(&s->writes, &op));
	op->file = t->row->out_file;
	op->io = (struct io_op){ .kind = IO_WRITE, .buf = p, .bytes = n, .offset = t->row->out_at + t->written };
	t->written += n;
	s->phase = SLOT_WRITE;
	return exec_queue(s, op);
}

/* ------------------------------------------------------------------------------------------------------- a block */

static void count(struct slot *s)
{
	struct slot_stream *t = s->stream;
	struct run *run = s->x->run;

	if (t->pass == 0)
		atomic_fetch_add(&run->ranks[run->tasks[s->task].rank_index].bytes_done, t->n);
}

static FALLIBLE enum err end_stream(struct slot *s)
{
	const struct run_task *task = &s->x->run->tasks[s->task];
	struct slot_stream *t = s->stream;

	struct digest digest;
	digest_end(&t->base_digest, &digest);
	memcpy(t->row->base_xxh3, digest.xxh3_128, sizeof t->row->base_xxh3);
	digest_end(&t->now_digest, &digest);
	memcpy(t->row->now_xxh3, digest.xxh3_128, sizeof t->row->now_xxh3);
	t->row->now_crc32 = digest.crc32;
	if (t->row->kind == RUN_STREAM_ENCODE)
		t->row->out_bytes = t->row->changed ? t->written : 0;
	if (decodes(t)) {
		t->row->fault = (uint8_t)t->decoder.fault;
		t->row->fault_code = t->decoder.fault_code;
		t->row->fault_at = t->decoder.cursors[0].taken;
	}
	if (t->next < task->first + task->count)
		return begin_stream(s);
	s->phase = SLOT_IDLE;
	return OK;
}

/* The first pass of an overwrite counts; positions and values are the next two. */
static FALLIBLE enum err next_pass(struct slot *s)
{
	struct slot_stream *t = s->stream;

	if (t->pass == 0 && t->row->encoding == DELTA_OVERWRITE && t->row->changed) {
		TRY(delta_encode_begin(t->encoder, DELTA_OVERWRITE, t->row->bytes, t->row->changed));
		t->passes = 3;
	}
	if (t->pass + 1 < t->passes)
		return begin_pass(s, t->pass + 1);
	bool encoded = t->row->encoding == DELTA_XOR || t->row->changed;
	if (!t->ended && encoded) {
		bool more;
		TRY(delta_encode_end(t->encoder, &t->to, &more));
		t->ended = !more;
	}
	if (t->to.n && t->row->changed)
		return write_out(s, t->to.p, t->to.n);
	return end_stream(s);
}

static FALLIBLE enum err encode_block(struct slot *s)
{
	struct slot_stream *t = s->stream;
	bool is_overwrite = t->row->encoding == DELTA_OVERWRITE, more = false;

	if (t->pass == 0 && !t->decoded) { /* seen for the first time */
		digest_add(&t->base_digest, t->base, t->n);
		digest_add(&t->now_digest, t->now, t->n);
		t->row->changed += delta_count(t->base, t->now, t->n);
		t->decoded = true;
		count(s);
	}
	if (!is_overwrite || t->pass > 0)
		TRY(delta_encode(t->encoder, t->pass - is_overwrite, t->at, t->base, t->now, t->n, &t->to, &more));
	if (more)
		return write_out(s, t->to.p, t->to.n);
	t->at += t->n;
	return t->at < t->row->bytes ? begin_block(s) : next_pass(s);
}

static FALLIBLE enum err end_decoding(struct slot *s)
{
	struct slot_stream *t = s->stream;
	bool more = false;

	if (decodes(t) && !t->decoder.fault)
		delta_decode_end(&t->decoder, &more);
	if (more) { /* of the frame alone */
		s->phase = SLOT_FETCH;
		return OK;
	}
	return end_stream(s);
}

/* A block of a base, or of what becomes of it. After a fault the base's digest is all that counts. */
static FALLIBLE enum err decode_block(struct slot *s)
{
	struct slot_stream *t = s->stream;
	struct delta_decoder *d = &t->decoder;
	bool more = false;

	if (t->at == t->row->bytes)
		return end_decoding(s);
	if (!t->decoded) {
		digest_add(&t->base_digest, t->base, t->n);
		t->decoded = true;
		count(s);
	}
	if (decodes(t) && !d->fault)
		delta_decode(d, t->at, t->base, t->n, &more);
	if (more) {
		s->phase = SLOT_FETCH;
		return OK;
	}
	t->at += t->n;
	if (!decodes(t) || d->fault)
		return t->at < t->row->bytes ? begin_block(s) : end_decoding(s);
	digest_add(&t->now_digest, t->base, t->n);
	if (t->row->adler32)
		t->row->checksum32 = (uint32_t)adler32(t->row->checksum32, t->base, (uInt)t->n);
	return write_out(s, t->base, t->n);
}

static FALLIBLE enum err work(struct slot *s)
{
	return s->stream->row->kind == RUN_STREAM_ENCODE ? encode_block(s) : decode_block(s);
}

static FALLIBLE enum err fetched(struct slot *s)
{
	if (s->wave.ops.n || s->wave.reads.n) {
		TRY(exec_guarded(s, copy));
		s->wave.ops.n = s->wave.reads.n = 0;
	}
	TRY(exec_guarded(s, fill));
	if (s->wave.reads.n)
		return exec_queue_wave(s);
	return read_plan_more(&s->reads) ? OK : work(s);
}

static FALLIBLE enum err written(struct slot *s)
{
	struct slot_stream *t = s->stream;

	if (decodes(t))
		return t->at < t->row->bytes ? begin_block(s) : end_decoding(s);
	t->to.n = 0;
	if (t->at < t->row->bytes) /* the block is not done */
		return encode_block(s);
	return t->ended ? end_stream(s) : next_pass(s);
}

enum err exec_stream_advance(struct slot *s)
{
	return s->phase == SLOT_WRITE ? written(s) : fetched(s);
}
