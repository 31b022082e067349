/* memory.c: see memory.h. */
#include "runner/memory.h"

#include <pthread.h>

#include "runner/build.h"
#include "runner/input.h"
#include "tensor/linear.h"

enum { LOOKS_MAX = 64,                 /* at the parts of an FQN, for one chunk: they come in the order of the chunks, mostly */
       FAR_MAX = 64,                   /* copies in other nodes' memory */
       PARTS_MAX = 1 << 20 };          /* of all segments: their owners may write any number there; the rest is read from files */

static FALLIBLE enum err add_part(struct memory *m, uint32_t segment, const struct image_part *part)
{
	struct map *first = &m->first[m->segments.v[segment].far != NULL];
	uint32_t index = (uint32_t)m->parts.n, head;
	struct memory_part *p;

	TRY(vec_push(&m->parts, &p));
	*p = (struct memory_part){ .part = *part, .segment = segment, .next = UINT32_MAX };
	TRY(map_intern(first, part->fqn, index, &head));
	if (head == index)
		return OK;
	/* behind the first: a ring without an end, so that a search goes on where the last one has found something */
	p->next = m->parts.v[head].next == UINT32_MAX ? head : m->parts.v[head].next;
	m->parts.v[head].next = index;
	return map_put(first, part->fqn, index);
}

static FALLIBLE enum err add_parts(struct memory *m, uint32_t segment)
{
	const struct image *image = m->segments.v[segment].image;

	for (uint32_t i = 0; i < image_part_count(image); i++) {
		struct image_part part = image_part_at(image, i);
		TRY(add_part(m, segment, &part));
	}
	return OK;
}

static FALLIBLE enum err open_segment(struct memory *m, const struct rank_segment *r, const int *fds)
{
	struct memory_segment *s;
	struct image *image;

	if (input_read_image(r, fds, &image)) { /* it is another generation's by now, or shrunk */
		err_clear();
		return OK;
	}
	enum err e = vec_push(&m->segments, &s);
	if (e) {
		image_free(image);
		return e;
	}
	*s = (struct memory_segment){ .segment = *r, .image = image, .file = UINT32_MAX };
	return add_parts(m, (uint32_t)m->segments.n - 1);
}

static FALLIBLE enum err add_far(struct memory *m, const struct checkpoint *c)
{
	const struct sdict *sd = c->sd;
	uint32_t first = (uint32_t)m->segments.n;
	struct memory_segment *s;

	for (uint32_t i = 0; i < sd->file_count; i++) {
		TRY(vec_push(&m->segments, &s));
		*s = (struct memory_segment){ .far = c, .far_file = i, .file = UINT32_MAX };
	}
	for (uint64_t i = 0; i < sd->chunk_count && m->parts.n < PARTS_MAX; i++) {
		const struct sd_chunk *k = &sd->chunks[i];
		const struct sd_tensor *t = &sd->tensors[k->tensor];
		const struct image_part part = { .fqn = t->fqn, .dtype = t->dtype, .ndim = t->ndim, .shape = t->shape, .offsets = k->dims,
						 .sizes = k->dims + t->ndim, .offset = k->loc.offset, .bytes = k->loc.length };
		if (!k->loc.transform && k->loc.file < sd->file_count)
			TRY(add_part(m, first + k->loc.file, &part));
	}
	return OK;
}

/* A copy in another node's memory. A node that is away, or has it no more, has nothing: `found` is NULL then. */
struct far_copy {
	const struct stores *stores;
	const char *storage, *name;
	struct checkpoint *found;
	pthread_t thread;
	bool runs;
};

static void *open_copy(void *user)
{
	struct far_copy *f = user;
	const struct ref ref = ref_checkpoint(f->storage, f->name);

	if (checkpoint_open(f->stores, &ref, &f->found)) {
		f->found = NULL;
		err_clear();
	}
	return NULL;
}

/* Asks all nodes side by side: silent ones cost the time of one. */
static void open_copies(struct far_copy *v, uint32_t count)
{
	for (uint32_t i = 1; i < count; i++)
		v[i].runs = pthread_create(&v[i].thread, NULL, open_copy, &v[i]) == 0;
	for (uint32_t i = 0; i < count; i++)
		if (v[i].runs)
			(void)pthread_join(v[i].thread, NULL);
		else
			(void)open_copy(&v[i]);
}

static FALLIBLE enum err open_far(const struct memory_lists *l, struct memory *out)
{
	struct far_copy v[FAR_MAX];
	struct checkpoint **at;
	const json_t *entry;
	uint32_t count = 0;
	size_t i;

	json_array_foreach(l->list, i, entry) {
		const char *storage = json_string_value(json_object_get(entry, "storage"));
		const char *name = json_string_value(json_object_get(entry, "name"));
		if (l->stores && storage && name && count < FAR_MAX)
			v[count++] = (struct far_copy){ .stores = l->stores, .storage = storage, .name = name };
	}
	open_copies(v, count);
	enum err e = OK;
	for (i = 0; i < count; i++) {
		e = !e && v[i].found ? vec_push(&out->far, &at) : e;
		if (e || !v[i].found) {
			checkpoint_free(v[i].found);
			continue;
		}
		*at = v[i].found;
		e = add_far(out, v[i].found);
	}
	return e;
}

/* Does the manifest name the save that the entry is of? Hosts that save together have a job each; the manifest has one. */
static bool is_save(const struct manifest *manifest, const json_t *entry)
{
	const char *job = json_string_value(json_object_get(entry, "job"));
	const char *hosts = json_string_value(json_object_get(entry, "hosts"));
	bool found = job && strcmp(manifest->job, job) == 0;

	for (uint64_t i = 0; job && hosts && i < manifest->hosts.n; i++)
		found = found || str_is(manifest->hosts.v[i], hosts);
	return found;
}

/* Copies of this host come first, then those of other nodes. */
static FALLIBLE enum err open_all(const struct memory_lists *l, const struct manifest *manifest, struct memory *out)
{
	const int *fds = l->fds;
	const json_t *entry;
	struct rank_segments *ranks;
	size_t i;

	if (!manifest)
		return OK;
	json_array_foreach(l->list, i, entry) {
		if (!is_save(manifest, entry))
			continue;
		TRY(vec_push(&out->lists, &ranks));
		TRY(rank_segments_read(entry, 0, l->fd_count, ranks));
		for (uint32_t r = 0; r < ranks->count && out->parts.n < PARTS_MAX; r++)
			TRY(open_segment(out, &ranks->v[r], fds));
	}
	return open_far(l, out);
}

void memory_open(const struct memory_lists *lists, const struct manifest *manifest, struct memory *out)
{
	*out = (struct memory){ 0 };
	if (!open_all(lists, manifest, out))
		return;
	err_clear();
	memory_close(out);
	*out = (struct memory){ 0 };
}

/* Has the part all elements of the box of tensor t, in a row? *at_out: the first byte's place in the segment. */
static bool has_box(const struct image_part *p, const struct sd_tensor *t, const int64_t *box, uint64_t *at_out)
{
	const int64_t *sizes = box + t->ndim;
	uint32_t n = t->ndim;
	int64_t off[NDIM_MAX];
	uint64_t first;

	if (p->dtype != t->dtype || p->ndim != n)
		return false;
	for (uint32_t i = 0; i < n; i++) {
		off[i] = box[i] - p->offsets[i];
		if (p->shape[i] != t->shape[i] || off[i] < 0 || off[i] > p->sizes[i] || sizes[i] > p->sizes[i] - off[i])
			return false;
	}
	if (!linear_is_run(n, p->sizes, off, sizes, &first))
		return false;
	*at_out = p->offset + first * dtype_bytes(t->dtype);
	return true;
}

/* As a source's file that another node's memory stands for. */
static FALLIBLE enum err add_far_file(struct run_build *b, struct memory_segment *s)
{
	const struct checkpoint *c = s->far;
	const struct sd_file *f = &c->sd->files[s->far_file];
	uint32_t dir;

	TRY(run_add_dir(b, c->store->index, str_of(c->name), &dir));
	TRY(run_add_file(b, RUN_FILE_SOURCE, dir, f->name, c->file_bytes[s->far_file], &s->file));
	b->files.v[s->file].rank = f->rank;
	b->files.v[s->file].spare = true;
	return OK;
}

static FALLIBLE enum err add_place(struct memory *m, struct run_build *b, uint32_t segment, uint64_t at, uint32_t src)
{
	struct memory_segment *s = &m->segments.v[segment];

	if (s->file == UINT32_MAX && s->far)
		TRY(add_far_file(b, s));
	else if (s->file == UINT32_MAX)
		TRY(input_add_segment(b, &s->segment, s->segment.rank, false, &s->file));
	b->srcs.v[src].memory = s->file + 1;
	b->srcs.v[src].memory_at = at;
	return OK;
}

/* Tries the parts of the FQN from *head on, and leaves there the one that was found. */
static bool find_box(const struct memory *m, const struct sd_tensor *t, const struct sd_chunk *c, uint32_t *head, uint64_t *at_out)
{
	for (uint32_t looks = 0, i = *head; i != MAP_NONE && looks < LOOKS_MAX; looks++) {
		if (has_box(&m->parts.v[i].part, t, c->dims, at_out)) {
			*head = i;
			return true;
		}
		i = m->parts.v[i].next;
		if (i == UINT32_MAX || i == *head)
			break;
	}
	return false;
}

/* This host's own memory comes first. */
static FALLIBLE enum err place_chunk(struct memory *m, struct run_build *b, const struct sd_tensor *t, const struct sd_chunk *c,
				     uint32_t src, uint32_t heads[2])
{
	uint64_t at;

	for (int i = 0; i < 2; i++)
		if (find_box(m, t, c, &heads[i], &at))
			return add_place(m, b, m->parts.v[heads[i]].segment, at, src);
	return OK;
}

enum err memory_place(struct memory *m, struct run_build *b, const struct sdict *sd, uint32_t first)
{
	uint32_t tensor = UINT32_MAX, heads[2] = { MAP_NONE, MAP_NONE };
	uint64_t bytes;

	for (uint64_t i = 0; m->parts.n && i < sd->chunk_count; i++) {
		const struct sd_chunk *c = &sd->chunks[i];
		const struct sd_tensor *t = &sd->tensors[c->tensor];
		struct run_src *src = &b->srcs.v[first + i];
		for (int k = 0; k < 2 && c->tensor != tensor; k++)
			heads[k] = map_get(&m->first[k], t->fqn);
		tensor = c->tensor;
		if ((heads[0] == MAP_NONE && heads[1] == MAP_NONE) || b->files.v[src->file].kind != RUN_FILE_SOURCE || src->strides_at ||
		    src->raw_digests)
			continue;
		TRY(build_payload_bytes(b, src, &bytes));
		if (build_comparable(b, src, bytes) && src->by_blocks && bytes)
			TRY(place_chunk(m, b, t, c, (uint32_t)(first + i), heads));
	}
	return OK;
}

void memory_close(struct memory *m)
{
	for (uint64_t i = 0; i < m->segments.n; i++)
		image_free(m->segments.v[i].image);
	for (uint64_t i = 0; i < m->lists.n; i++)
		rank_segments_free(&m->lists.v[i]);
	for (uint64_t i = 0; i < m->far.n; i++)
		checkpoint_free(m->far.v[i]);
	map_free(&m->first[0]);
	map_free(&m->first[1]);
	vec_free(&m->far);
	vec_free(&m->segments);
	vec_free(&m->parts);
	vec_free(&m->lists);
}
