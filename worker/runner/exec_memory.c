/* exec_memory.c: scans whose bytes still lie in memory (memory.h), of this host or of another node, or are sent by hosts that load, too
 * (spread.h): taken from there if they prove equal to the checkpoint's, else from the file.
 *
 * This host's are copied at once. Another node's come with the wave, many at a time, straight to their place where they have one, and are
 * hashed as they come; what does not come, or is other bytes, is read from its file in the next wave. */
#include "runner/exec_impl.h"
#include "runner/spread.h"
#include "store/checked.h"

/* Bytes of a segment are compared at all times: nothing keeps its owner from writing there. */
static bool is_equal(const struct block_digest *want, const struct digest *got)
{
	return memcmp(want->xxh3_128, got->xxh3_128, sizeof got->xxh3_128) == 0;
}

/* Copies the scan's bytes from a segment of this host that has them, too. *equal_out false: they are not the checkpoint's any more, or
 * gone. */
static FALLIBLE enum err copy_memory(struct slot *s, const struct slot_scan *sc, const struct block_digest *want, bool *equal_out)
{
	const struct run *run = s->x->run;
	const struct run_scan *scan = &run->scans[sc->scan];
	const struct run_src *src = &run->srcs[scan->src];
	struct digest_stream stream;
	struct digest got;
	struct store_at *at;

	*equal_out = false;
	if (files_pin(&s->x->files, src->memory - 1, &at)) {
		err_clear();
		return OK;
	}
	enum err e = exec_read_cached(s, sc, store_fd(*at), src->memory_at + scan->begin, DIGEST_XXH3, &stream, equal_out);
	files_unpin(&s->x->files, src->memory - 1);
	if (*equal_out) {
		digest_end(&stream, &got);
		*equal_out = is_equal(want, &got);
	}
	return e;
}

/* The scan's bytes, from memory, are those of the checkpoint. */
static FALLIBLE enum err use_memory(struct slot *s, struct slot_scan *sc, const struct src_info *info, const unsigned char *bytes,
				    _Atomic uint64_t *counter)
{
	struct run *run = s->x->run;
	struct run_scan *scan = &run->scans[sc->scan];

	scan->from_memory = true;
	atomic_fetch_add(&run->head->verified_bytes, scan->end - scan->begin);
	atomic_fetch_add(counter, scan->end - scan->begin);
	return sc->direct ? OK : exec_scatter(s, scan, info, bytes);
}

/* Adds the read from another node's memory to the wave, beside those of files: a node takes longer to answer than this host's memory. */
static FALLIBLE enum err read_far(struct slot *s, struct slot_scan *sc, bool *full_out)
{
	const struct run_scan *scan = &s->x->run->scans[sc->scan];
	const struct run_src *src = &s->x->run->srcs[scan->src];

	s->wave.pages = false; /* an image may end within a page */
	enum err e = wave_add(&s->wave, src->memory - 1, src->memory_at + scan->begin, scan->end - scan->begin,
			      sc->direct ? sc->direct_at : NULL, &sc->read, full_out);
	s->wave.pages = s->x->past_cache;
	if (!e && !*full_out)
		s->wave.reads.v[sc->read].which = DIGEST_XXH3;
	sc->far = true;
	return e;
}

enum err exec_take_memory(struct slot *s, struct slot_scan *sc, const struct src_info *info, bool *done_out, bool *full_out)
{
	struct run *run = s->x->run;
	struct run_scan *scan = &run->scans[sc->scan];
	struct run_src *src = &run->srcs[scan->src];
	const struct block_digest *want = exec_digest_of(run, scan);

	*done_out = false;
	if (!src->memory || !info || !want || atomic_load(&src->memory_lost) || atomic_load(&run->files[src->memory - 1].gone))
		return OK;
	if (run->files[src->memory - 1].spare) {
		*done_out = true;
		return read_far(s, sc, full_out);
	}
	TRY(copy_memory(s, sc, want, done_out));
	if (!*done_out) {
		atomic_store(&src->memory_lost, 1);
		return OK;
	}
	sc->read = UINT32_MAX;
	return use_memory(s, sc, info, s->in, &run->head->memory_bytes);
}

static FALLIBLE enum err read_file(struct slot *s, uint64_t index)
{
	struct slot_scan *sc = &s->scans.v[index], *again;
	struct slot_scan next = { .scan = sc->scan, .doubted = true };

	sc->skip = sc->again = true;
	TRY(vec_push(&s->scans, &again));
	*again = next;
	return OK;
}

enum err exec_doubt(struct slot *s, uint64_t index, enum err e)
{
	const struct slot_scan *sc = &s->scans.v[index];
	const struct wave_read *r = sc->read < s->wave.reads.n ? &s->wave.reads.v[sc->read] : NULL;

	if (!e || !r || sc->doubted || !checked_is_damage(e) || !spread_doubt(s->x->run, r->file, r->offset, r->offset + r->bytes))
		return e;
	err_clear();
	return read_file(s, index);
}

enum err exec_take_far(struct slot *s, uint64_t index)
{
	struct run *run = s->x->run;
	struct slot_scan *sc = &s->scans.v[index];
	struct run_scan *scan = &run->scans[sc->scan];
	struct run_src *src = &run->srcs[scan->src];
	const struct wave_op *op = wave_op(&s->wave, sc->read);
	const unsigned char *bytes = wave_data(&s->wave, sc->read);
	const struct digest *known = wave_digest(&s->wave, op);
	struct digest got = known ? *known : (struct digest){ 0 };
	struct src_info *info;

	if (!op->failed && !known)
		digest_xxh3(bytes, scan->end - scan->begin, got.xxh3_128);
	if (!op->failed && is_equal(exec_digest_of(run, scan), &got)) {
		TRY(sources_info(&s->x->sources, scan->src, &info));
		return use_memory(s, sc, info, bytes, &run->head->neighbour_bytes);
	}
	atomic_store(&src->memory_lost, 1);
	return read_file(s, index);
}
