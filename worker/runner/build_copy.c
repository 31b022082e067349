/* build_copy.c: the tables of a run that copies files byte for byte (see build.h): which ranges are copied, and what each is compared with.
 *
 * A manifest has digests of payload blocks, of the archives around payloads, and of whole items. The copy is cut where digest blocks end,
 * so that a block is compared while it is in the CPU's cache; a digest that reaches beyond its piece costs a second read of what lies
 * outside. Every byte of a file belongs to one check: a digest, "zeros" between the items of a file that dcpd wrote, or nothing, which
 * is counted. */
#include <stdlib.h>

#include "base/num.h"
#include "format/torch_item.h"
#include "runner/build.h"

enum { PIECE_MAX = BUILD_WIDE_TASK_BYTES, PAGE = 4096, BIG_CHECK = 256 << 10 };

struct range {
	uint64_t begin, end;
};

/* A chunk of the source, by its place. */
struct chunk_at {
	uint32_t file;
	uint64_t offset, chunk;
};

struct build_copier {
	struct run_build *b;
	struct build_copies how;
	struct vec(struct chunk_at) chunks;
	struct vec(struct run_check) checks;   /* digests of the file in hand, by their first byte */
	struct vec(struct range) known;        /* the bytes that they are of */
	struct vec(uint64_t) cuts;             /* where its pieces end */
	struct vec(struct placed { uint64_t piece; struct run_check check; }) placed;
};

static int by_chunk(const void *a, const void *b)
{
	const struct chunk_at *x = a, *y = b;

	return num_order(x->file, y->file) ?: num_order(x->offset, y->offset);
}

static int by_begin(const void *a, const void *b)
{
	const struct range *x = a, *y = b;

	return num_order(x->begin, y->begin) ?: num_order(x->end, y->end);
}

static int by_first(const void *a, const void *b)
{
	const struct run_check *x = a, *y = b;

	return num_order(x->at[0], y->at[0]);
}

static int by_piece(const void *a, const void *b)
{
	const struct placed *x = a, *y = b;

	return num_order(x->piece, y->piece) ?: num_order(x->check.at[0], y->check.at[0]);
}

static FALLIBLE enum err note_chunks(struct build_copier *k)
{
	const struct sdict *sd = k->how.source ? k->how.source->sd : NULL;
	struct chunk_at *at;

	for (uint64_t i = 0; sd && i < sd->chunk_count; i++) {
		TRY(vec_push(&k->chunks, &at));
		*at = (struct chunk_at){ sd->chunks[i].loc.file, sd->chunks[i].loc.offset, i };
	}
	if (k->chunks.n)
		qsort(k->chunks.v, k->chunks.n, sizeof *k->chunks.v, by_chunk);
	return OK;
}

enum err build_copies_begin(struct run_build *b, const struct build_copies *how, struct build_copier **out)
{
	struct build_copier *k = *out = mem_zalloc(1, sizeof *k);

	NEED(k, "no memory for a plan");
	k->b = b;
	k->how = *how;
	b->opts.mode = RUN_COPY_FILES;
	b->opts.verify = true;
	b->opts.task_bytes = PAGE;
	return note_chunks(k);
}

void build_copies_free(struct build_copier *k)
{
	if (!k)
		return;
	vec_free(&k->chunks);
	vec_free(&k->checks);
	vec_free(&k->known);
	vec_free(&k->cuts);
	vec_free(&k->placed);
	mem_free(k);
}

/* ---- what is known of a file ---- */

static FALLIBLE enum err add_known(struct build_copier *k, uint64_t at, uint64_t n)
{
	struct range *r;

	if (n == 0)
		return OK;
	TRY(vec_push(&k->known, &r));
	*r = (struct range){ at, at + n };
	return OK;
}

/* Two ranges, one behind the other, that one digest is of; each may be empty. */
static FALLIBLE enum err add_check(struct build_copier *k, struct range a, struct range b, const unsigned char xxh3_128[16])
{
	struct run_check *c;

	if (a.begin == a.end && b.begin == b.end)
		return OK;
	TRY(vec_push(&k->checks, &c));
	*c = (struct run_check){ .kind = RUN_CHECK_DIGEST, .at = { a.begin, b.begin }, .bytes = { a.end - a.begin, b.end - b.begin } };
	memcpy(c->xxh3_128, xxh3_128, sizeof c->xxh3_128);
	TRY(add_known(k, a.begin, c->bytes[0]));
	return add_known(k, b.begin, c->bytes[1]);
}

/* The chunk whose item begins there; NULL: metadata name none (of what several ranks hold the union of a rank-local checkpoint has one). */
static const struct sd_chunk *chunk_at(const struct build_copier *k, uint32_t file, uint64_t offset)
{
	const struct chunk_at key = { .file = file, .offset = offset };
	const struct chunk_at *at = k->chunks.n ? bsearch(&key, k->chunks.v, k->chunks.n, sizeof key, by_chunk) : NULL;

	return at ? &k->how.source->sd->chunks[at->chunk] : NULL;
}

/* The number by which metadata call the file; UINT32_MAX: they do not. */
static uint32_t file_of(const struct sdict *sd, struct str name)
{
	for (uint32_t f = 0; f < sd->file_count; f++)
		if (str_eq(sd->files[f].name, name))
			return f;
	return UINT32_MAX;
}

/* An item of dcpd's is laid out as its tensor's shape says. False: it is not. */
static bool layout_of(const struct sdict *sd, const struct sd_chunk *c, uint64_t length, struct item_layout *out)
{
	const struct sd_tensor *t = &sd->tensors[c->tensor];
	uint32_t item = dtype_bytes(t->dtype);
	uint64_t numel;

	if (box_numel(t->ndim, sd_sizes(c, t->ndim), &numel) || numel > length / item ||
	    item_layout_tensor(t->dtype, t->ndim, sd_sizes(c, t->ndim), length - numel * item > PAGE ? PAGE : 64, out)) {
		err_clear();
		return false;
	}
	return out->length == length;
}

/* Finds the payload of an item that no chunk names by the item's own head. False: it cannot be told. */
static bool head_of(const struct build_copier *k, const char *file, const struct manifest_item *item, struct item_layout *out)
{
	CLEANUP(store_close) struct store_at at = STORE_NOTHING;
	struct item_tensor t;

	enum err e = store_open_file(k->how.source->dir, file, STORE_READ, &at);
	struct store_span stored = { at, item->offset };
	struct item_source src = { store_read_span, &stored, item->length };
	e = e ?: item_read_tensor(&src, &t);
	if (e)
		err_clear();
	if (e || t.deflated || !num_inside(t.payload_off, t.payload_bytes, item->length))
		return false;
	*out = (struct item_layout){ .payload_off = t.payload_off, .payload_bytes = t.payload_bytes, .length = item->length };
	return true;
}

/* Digests of [at, at + bytes): block by block. */
static FALLIBLE enum err add_blocks(struct build_copier *k, const struct manifest_item *item, uint64_t at, uint64_t bytes)
{
	const struct manifest *m = k->how.source->manifest;
	uint64_t begin = 0;

	for (uint32_t i = 0; i < item->digest_count; i++) {
		const struct block_digest *d = &m->digests.v[item->digest_at + i];
		uint64_t end = d->end == UINT64_MAX ? bytes : d->end;
		if (end < begin || end > bytes)
			return ERR(FORMAT_MANIFEST, "a digest block ends outside its item");
		TRY(add_check(k, (struct range){ at + begin, at + end }, (struct range){ 0 }, d->xxh3_128));
		begin = end;
	}
	return OK;
}

/* number: of the file, as metadata call it. */
static FALLIBLE enum err add_item(struct build_copier *k, struct str file, uint32_t number, const struct manifest_item *item)
{
	struct item_layout l = { 0 };
	const struct sd_chunk *c = item->raw ? NULL : chunk_at(k, number, item->offset);

	if (item->raw)
		return add_blocks(k, item, item->offset, item->length);
	if (!(c && layout_of(k->how.source->sd, c, item->length, &l)) && !head_of(k, file.p, item, &l))
		return OK; /* its bytes have nothing to be compared with */
	uint64_t payload = item->offset + l.payload_off, behind = payload + l.payload_bytes;
	TRY(add_blocks(k, item, payload, l.payload_bytes));
	if (!item->has_edges)
		return OK;
	return add_check(k, (struct range){ item->offset, payload }, (struct range){ behind, item->offset + item->length }, item->edges);
}

/* *zeros_out: what lies between items are zeros. */
static FALLIBLE enum err add_listed(struct build_copier *k, const struct build_copy *file, bool *zeros_out)
{
	const struct manifest *m = k->how.source ? k->how.source->manifest : NULL;
	uint32_t f = m ? map_get(&m->names, file->name) : MAP_NONE;

	*zeros_out = f != MAP_NONE && m->files.v[f].mtime_ns && m->files.v[f].item_count;
	if (f == MAP_NONE)
		return OK;
	const struct manifest_file *listed = &m->files.v[f];
	uint32_t number = file_of(k->how.source->sd, file->name);
	if (listed->bytes != file->bytes)
		return err_at_file(ERR(DIGEST_MISMATCH, "the file has %ju bytes, %ju were written", (uintmax_t)file->bytes,
				       (uintmax_t)listed->bytes), file->name.p, (int64_t)num_min(file->bytes, listed->bytes));
	each(item, m->items.v + listed->first_item, listed->item_count) {
		if (!num_inside(item->offset, item->length, file->bytes))
			return err_at_file(ERR(FORMAT_MANIFEST, "an item lies outside its file"), file->name.p, (int64_t)item->offset);
		TRY(err_at_file(add_item(k, file->name, number, item), file->name.p, (int64_t)item->offset));
	}
	return OK;
}

/* ---- pieces ---- */

/* May blocks be written past the page cache, so that pieces are of whole pages? Not where large digests begin elsewhere. */
static bool is_direct(const struct build_copier *k)
{
	bool direct = k->how.direct;

	for (uint64_t i = 0; direct && i < k->checks.n; i++)
		direct = k->checks.v[i].bytes[0] <= BIG_CHECK || k->checks.v[i].at[0] % PAGE == 0;
	return direct;
}

/* The digest that begins before `at` and ends behind it; *next: the first that may. NULL: none does. */
static const struct run_check *across(const struct build_copier *k, uint64_t at, uint64_t *next)
{
	while (*next < k->checks.n && k->checks.v[*next].at[0] + k->checks.v[*next].bytes[0] <= at &&
	       k->checks.v[*next].at[0] + PIECE_MAX < at)
		(*next)++;
	for (uint64_t i = *next; i < k->checks.n && k->checks.v[i].at[0] < at; i++)
		if (k->checks.v[i].at[0] + k->checks.v[i].bytes[0] > at)
			return &k->checks.v[i];
	return NULL;
}

/* Returns the end of the piece that begins at `begin`: between two digests if that can be. */
static uint64_t cut(const struct build_copier *k, uint64_t begin, uint64_t bytes, bool direct, uint64_t *next)
{
	uint64_t task = k->how.in_memory ? BUILD_MEMORY_TASK_BYTES : BUILD_TASK_BYTES, unit = direct ? PAGE : 1;
	uint64_t end = begin + task;

	if (bytes - begin <= task)
		return bytes;
	const struct run_check *c = across(k, end, next);
	if (!c)
		return end;
	uint64_t before = c->at[0], behind = c->at[0] + c->bytes[0];
	if (before > begin && before % unit == 0)
		return before;
	if (behind - begin <= PIECE_MAX && (behind % unit == 0 || behind == bytes))
		return behind;
	return end;
}

static FALLIBLE enum err cut_pieces(struct build_copier *k, uint64_t bytes, bool direct)
{
	uint64_t next = 0, *end;

	k->cuts.n = 0;
	for (uint64_t at = 0; at < bytes;) {
		TRY(build_room(k->b->copies.n + k->cuts.n, 1));
		TRY(vec_push(&k->cuts, &end));
		at = *end = cut(k, at, bytes, direct, &next);
	}
	return OK;
}

/* The piece that has the byte before `end`. */
static uint64_t piece_of(const struct build_copier *k, uint64_t end)
{
	uint64_t low = 0, high = k->cuts.n - 1;

	while (low < high) {
		uint64_t mid = low + (high - low) / 2;
		if (k->cuts.v[mid] >= end)
			high = mid;
		else
			low = mid + 1;
	}
	return low;
}

static FALLIBLE enum err place(struct build_copier *k, const struct run_check *check)
{
	uint64_t end = num_max(check->bytes[0] ? check->at[0] + check->bytes[0] : 0, check->bytes[1] ? check->at[1] + check->bytes[1] : 0);
	struct placed *p;

	TRY(vec_push(&k->placed, &p));
	*p = (struct placed){ piece_of(k, end), *check };
	return OK;
}

/* A range without a digest, piece by piece. */
static FALLIBLE enum err place_gap(struct build_copier *k, uint64_t begin, uint64_t end, bool zeros)
{
	while (begin < end) {
		uint64_t to = num_min(end, k->cuts.v[piece_of(k, begin + 1)]);
		struct run_check gap = { .kind = zeros ? RUN_CHECK_ZEROS : RUN_CHECK_NOTHING, .at = { begin }, .bytes = { to - begin } };
		TRY(place(k, &gap));
		begin = to;
	}
	return OK;
}

static FALLIBLE enum err place_all(struct build_copier *k, uint64_t bytes, bool zeros)
{
	uint64_t at = 0;

	k->placed.n = 0;
	for (uint64_t i = 0; i < k->checks.n; i++)
		TRY(place(k, &k->checks.v[i]));
	if (k->known.n)
		qsort(k->known.v, k->known.n, sizeof *k->known.v, by_begin);
	for (uint64_t i = 0; i < k->known.n; i++) {
		TRY(place_gap(k, at, k->known.v[i].begin, zeros));
		at = num_max(at, k->known.v[i].end);
	}
	TRY(place_gap(k, at, bytes, zeros));
	if (k->placed.n)
		qsort(k->placed.v, k->placed.n, sizeof *k->placed.v, by_piece);
	return OK;
}

static FALLIBLE enum err add_piece(struct build_copier *k, const struct run_copy *proto, uint64_t piece, uint64_t *placed)
{
	struct run_build *b = k->b;
	struct run_copy *copy;
	struct run_check *check;
	struct run_task *task;
	uint64_t begin = piece ? k->cuts.v[piece - 1] : 0, pages;

	TRY(vec_push(&b->tasks, &task));
	*task = (struct run_task){ .first = b->copies.n, .count = 1 };
	TRY(vec_push(&b->copies, &copy));
	*copy = *proto;
	copy->offset = begin;
	copy->bytes = k->cuts.v[piece] - begin;
	copy->first_check = b->checks.n;
	for (; *placed < k->placed.n && k->placed.v[*placed].piece == piece; ++*placed) {
		TRY(vec_push(&b->checks, &check));
		*check = k->placed.v[*placed].check;
		copy->check_count++;
	}
	TRY(num_align(copy->bytes, PAGE, &pages));
	b->opts.task_bytes = (uint32_t)num_max(b->opts.task_bytes, pages);
	return OK;
}

enum err build_copies_add(struct build_copier *k, const struct build_copy *file)
{
	struct run_build *b = k->b;
	struct run_copy proto = { 0 };
	uint64_t placed = 0;
	bool zeros = false;

	k->checks.n = k->known.n = 0;
	TRY(build_other_source(b, k->how.from, file->name, file->bytes, NULL, &proto.src));
	atomic_store(&b->srcs.v[proto.src].unverified, 0); /* counted as it is copied */
	TRY(run_add_file(b, RUN_FILE_TARGET, k->how.to, file->target.n ? file->target : file->name, file->bytes, &proto.to));
	if (file->digest)
		TRY(add_check(k, (struct range){ 0, file->bytes }, (struct range){ 0 }, file->digest));
	else
		TRY(add_listed(k, file, &zeros));
	if (k->checks.n)
		qsort(k->checks.v, k->checks.n, sizeof *k->checks.v, by_first);
	bool direct = is_direct(k);
	TRY(cut_pieces(k, file->bytes, direct));
	if (k->cuts.n)
		TRY(place_all(k, file->bytes, zeros));
	for (uint64_t i = 0; i < k->cuts.n; i++)
		TRY(add_piece(k, &proto, i, &placed));
	struct run_file *f = &b->files.v[proto.to];
	f->direct = direct;
	f->in_memory = k->how.in_memory;
	atomic_store(&f->blocks_left, (uint32_t)k->cuts.n);
	return OK;
}

enum err build_copies_end(struct build_copier *k)
{
	struct run_build *b = k->b;
	struct run_rank *rank;

	TRY(vec_push(&b->ranks, &rank));
	rank->task_count = b->tasks.n;
	each(c, b->copies.v, b->copies.n)
		TRY(num_add(rank->bytes_total, c->bytes, &rank->bytes_total));
	return OK;
}
