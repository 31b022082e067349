/* input.c: see input.h. */
#include "runner/input.h"

#include <stdio.h>

#include "base/num.h"
#include "os/fs.h"
#include "runner/plan_cache.h"
#include "runner/spool.h"
#include "store/identity.h"

enum { VALUE_MAX = 1 << 30 };

/* Does a job read more than one checkpoint, whose files may have the same names? */
static bool reads_several(const struct spec *s)
{
	bool several = s->sources.n > 1 || s->base.kind == REF_CHECKPOINT || (s->a.kind == REF_CHECKPOINT && s->b.kind == REF_CHECKPOINT);

	for (uint32_t i = 0; i < s->transform.count; i++)
		several = several || s->transform.rules[i].kind == CONVERT_FROM;
	return several;
}

void input_close(struct input *s)
{
	checkpoint_free(s->checkpoint);
	sdict_free(s->images);
	*s = (struct input){ 0 };
}

bool input_verifies(const struct job *j)
{
	return j->spec.verify == READ_CHECK_DIGEST;
}

enum err input_segment_error(enum err e)
{
	return e == ERR_STORAGE_IO ? ERR(SEGMENT_SHRUNK, "the segment is smaller than its image") : e;
}

static enum err segment_error(enum err e, int64_t rank)
{
	return err_at_rank(input_segment_error(e), rank);
}

enum err input_read_header(const struct rank_segment *r, const int *fds, void **out, uint64_t *n_out)
{
	unsigned char first[8];
	uint64_t json_bytes;

	if (r->image_bytes < sizeof first)
		return err_at_rank(ERR(FORMAT_IMAGE, "an image of %ju bytes", (uintmax_t)r->image_bytes), r->rank);
	enum err e = fs_pread(fds[r->fd], first, sizeof first, 0, "segment");
	if (e)
		return segment_error(e, r->rank);
	e = sft_header_bytes(first, r->image_bytes, &json_bytes);
	if (e)
		return err_at_rank(e, r->rank);
	CLEANUP(mem_free_ptr) void *header = mem_alloc(8 + json_bytes);
	NEED(header, "no memory for an image header");
	e = fs_pread(fds[r->fd], header, 8 + json_bytes, 0, "segment");
	if (e)
		return segment_error(e, r->rank);
	*n_out = 8 + json_bytes;
	*out = move(header);
	return OK;
}

static FALLIBLE enum err read_noted(const struct rank_segment *r, const int *fds, struct plan_prints *prints, struct image **out)
{
	CLEANUP(mem_free_ptr) void *header = NULL;
	uint64_t n = 0;

	TRY(input_read_header(r, fds, &header, &n));
	TRY(err_at_rank(image_parse(header, n, r->image_bytes, r->rank, out), r->rank));
	if (prints)
		plan_prints_note(prints, header, n, *out);
	return OK;
}

enum err input_read_image(const struct rank_segment *r, const int *fds, struct image **out)
{
	return read_noted(r, fds, NULL, out);
}

static FALLIBLE enum err images_noted(const struct rank_segments *s, const int *fds, struct plan_prints *prints, struct sdict **out)
{
	struct image **images = mem_zalloc(s->count, sizeof *images);
	enum err e = images ? OK : ERR(NO_MEMORY, "no memory for %u ranks", s->count);

	for (uint32_t i = 0; !e && i < s->count; i++)
		e = read_noted(&s->v[i], fds, prints, &images[i]);
	e = e ?: image_collect(images, s->count, out);
	for (uint32_t i = 0; images && i < s->count; i++)
		image_free(images[i]);
	mem_free(images);
	return e;
}

enum err input_images(const struct rank_segments *s, const int *fds, struct sdict **out)
{
	return images_noted(s, fds, NULL, out);
}

enum err input_add_segment(struct run_build *b, const struct rank_segment *r, uint32_t rank, bool writable, uint32_t *file_out)
{
	TRY(run_add_file(b, RUN_FILE_SEGMENT, 0, STR(""), 0, file_out));
	struct run_file *f = &b->files.v[*file_out];
	f->rank = rank;
	f->writable = writable;
	return input_set_segment(b, r, f);
}

enum err input_set_segment(struct run_build *b, const struct rank_segment *r, struct run_file *f)
{
	struct str name = str_of(r->name);

	TRY(run_add_string(b, name, &f->name_at));
	f->name_len = (uint32_t)name.n;
	f->bytes = r->image_bytes;
	f->fd_index = r->fd;
	f->filling = r->filling;
	f->ring_at = r->ring_at;
	f->ring_bytes = r->ring_bytes;
	return OK;
}

enum err input_open(struct job *j, const struct ref *ref, struct input *out)
{
	return input_open_noted(j, ref, NULL, out);
}

/* Tells the coordinator which checkpoint spec.source stands for, and which content of it the job reads, taken before it is opened. A
 * checkpoint that cannot be looked at has no identity: opening it says why. */
static FALLIBLE enum err tell_identity(struct job *j, const struct ref *ref)
{
	char identity[IDENTITY_MAX], name[CHECKPOINT_NAME_MAX];
	const struct store *store;
	enum format format;

	if (ref != &j->spec.source)
		return OK;
	if (stores_find(&j->worker->stores, ref->storage.p, &store) || checkpoint_follow(store, ref->name.p, name, &format) ||
	    identity_of(store_top(store), name, identity)) {
		err_clear();
		return OK;
	}
	memcpy(j->identity, identity, sizeof j->identity);
	CLEANUP(json_decrefp) json_t *doc = json_pack("{s:s, s:s, s:s, s:s}", "state", "planning", "stage", "metadata", "identity",
						      identity, "checkpoint", name);
	return doc ? job_send_json(j, FRAME_STATE, doc) : ERR(NO_MEMORY, "no memory for a message");
}

/* Adds state dict, generation and rank to the text of an image's error. */
static enum err at_state_dict(const char *name, uint64_t generation, enum err e)
{
	struct err_info was = *err_last();

	if (!e)
		return OK;
	if (was.rank >= 0)
		err_record(e, 0, was.place, "state dict '%s', generation %ju, rank %jd: %s", name, (uintmax_t)generation,
			   (intmax_t)was.rank, was.text);
	else
		err_record(e, 0, was.place, "state dict '%s', generation %ju: %s", name, (uintmax_t)generation, was.text);
	e = err_at_rank(e, was.rank);
	if (was.fqn[0])
		e = err_at_fqn(e, was.fqn, strlen(was.fqn));
	return err_expected(e, was.expected, was.actual);
}

/* A state dict of another node: its images are the files of a checkpoint (store/node_store.h). */
static FALLIBLE enum err open_remote(struct job *j, const struct ref *ref, struct input *out)
{
	char storage[STORE_NAME_MAX], name[CHECKPOINT_NAME_MAX];

	snprintf(storage, sizeof storage, "@%s", ref->node.p);
	snprintf(name, sizeof name, "%u%s/%s/%jd", (unsigned)j->uid, j->admin ? "a" : "", ref->name.p, (intmax_t)ref->generation);
	const struct ref images = ref_checkpoint(storage, name);
	TRY(checkpoint_open(&j->worker->stores, &images, &out->checkpoint));
	checkpoint_note(out->checkpoint, reads_several(&j->spec), &j->checked);
	out->sd = out->checkpoint->sd;
	out->world_size = out->checkpoint->world_size;
	return OK;
}

enum err input_open_noted(struct job *j, const struct ref *ref, struct plan_prints *prints, struct input *out)
{
	*out = (struct input){ .job = j, .checked = input_verifies(j) ? &j->checked : NULL, .verifies = out->verifies,
				.instead = out->instead };
	if (ref->kind == REF_CHECKPOINT) {
		TRY(tell_identity(j, ref));
		TRY(checkpoint_open_instead(&j->worker->stores, ref, out->instead, out->verifies ? &j->checked : NULL, &out->checkpoint));
		checkpoint_note(out->checkpoint, reads_several(&j->spec), &j->checked);
		out->sd = out->checkpoint->sd;
		out->world_size = out->checkpoint->world_size;
		/* these are of files, whatever they mean */
		if (j->kind == JOB_VERIFY || j->kind == JOB_INSPECT || j->kind == JOB_REPAIR || j->kind == JOB_REPLICATE)
			return OK;
		return checkpoint_check_whole(out->checkpoint);
	}
	if (ref->kind == REF_REMOTE)
		return open_remote(j, ref, out);
	out->state_dict = job_state_dict(j, ref);
	if (!out->state_dict)
		return ERR(NOT_FOUND, "there is no state dict '%s'", ref->name.p);
	enum err e = images_noted(out->state_dict, j->fds, prints, &out->images);
	TRY(at_state_dict(ref->name.p, out->state_dict->generation, e));
	out->sd = out->images;
	out->world_size = out->state_dict->world_size;
	return OK;
}

enum err input_undo_transforms(struct job *j, struct input *s, bool digested)
{
	return s->checkpoint ? spool_transforms(j, s->checkpoint, digested) : OK;
}

enum err input_select(struct input *s, const struct spec *spec, struct spec_view *view)
{
	TRY(spec_select(spec, s->sd, view));
	s->sd = view->sd;
	return OK;
}

enum err input_item_value(const void *bytes, uint64_t n, struct item_value *out)
{
	struct str all = { bytes, n };
	struct item_source src = source_memory(&all);

	return item_read_value(&src, out);
}

static FALLIBLE enum err add_segments(struct input *s, struct run_build *b, bool writable, uint32_t **file_map_out)
{
	uint32_t *map = mem_zalloc(s->images->file_count, sizeof *map);

	*file_map_out = map;
	NEED(map, "no memory for %ju segments", (uintmax_t)s->images->file_count);
	must(s->images->file_count <= s->state_dict->count);
	for (uint64_t i = 0; i < s->images->file_count; i++)
		TRY(input_add_segment(b, &s->state_dict->v[i], s->images->files[i].rank, writable, &map[i]));
	return OK;
}

enum err input_add_files(struct input *s, struct run_build *b, bool writable, uint32_t **file_map_out)
{
	uint64_t n = (s->checkpoint ? s->checkpoint->sd : s->images)->file_count;

	TRY(s->checkpoint ? build_source_files(b, s->checkpoint, file_map_out) : add_segments(s, b, writable, file_map_out));
	if (!s->has_spool)
		return OK;
	uint32_t *map = mem_grow(*file_map_out, n + 1, sizeof *map);
	NEED(map, "no memory for a spool");
	*file_map_out = map;
	TRY(run_add_file(b, RUN_FILE_SPOOL, 0, STR("spool"), s->spool_bytes, &map[n]));
	b->files.v[map[n]].fd_index = s->spool_fd;
	return OK;
}

enum run_src_kind input_kind(const struct input *s)
{
	return s->checkpoint ? build_kind(s->checkpoint) : RUN_SRC_PLAIN;
}

const struct manifest *input_manifest(const struct input *s)
{
	return s->checkpoint ? s->checkpoint->manifest : NULL;
}

/* With the digest in the manifest; what has none there (PyTorch's, or out of a spool), with its archive's CRC32s. */
static FALLIBLE enum err check_value(const struct input *s, const struct sd_value *v, const void *bytes, uint64_t n, bool *known_out)
{
	const struct manifest *m = input_manifest(s);
	const struct manifest_item *item = m ? manifest_find(m, s->sd->files[v->loc.file].name, v->loc.offset, v->loc.length) : NULL;
	struct str all = { bytes, n };
	struct item_source src = source_memory(&all);
	struct manifest_check check;
	uint64_t compared = 0, unknown = 0;

	*known_out = true;
	if (item && item->raw) {
		manifest_check_begin(&check, m->digests.v + item->digest_at, item->digest_count);
		return manifest_check_add(&check, bytes, n, true);
	}
	TRY(item_check_crc(&src, false, &compared, &unknown));
	*known_out = compared && !unknown;
	return OK;
}

static struct str file_of(const struct input *s, const struct sd_value *v)
{
	return s->sd->files[sd_origin_of(s->sd, v->loc).file].name;
}

enum err input_at_value(const struct input *s, const struct sd_value *v, enum err e)
{
	struct err_info info = *err_last();
	char name[ERR_FILE_MAX];

	if (e && v->kind == SD_VALUE_STORED && s->checkpoint) {
		struct str file = file_of(s, v);
		uint64_t at = sd_origin_of(s->sd, v->loc).offset;
		snprintf(name, sizeof name, "%.*s", (int)num_min(file.n, sizeof name - 1), file.p);
		if (!info.file[0] && info.offset >= 0) { /* so far relative to the item */
			info.offset += (int64_t)at;
			err_restore(&info);
		}
		e = err_at_file(e, name, (int64_t)at);
	}
	return err_at_rank(err_at_fqn(e, v->fqn.p, v->fqn.n), v->rank);
}

static FALLIBLE enum err read_stored(const struct input *s, const struct sd_value *v, const char *name, void *bytes, uint64_t n)
{
	CLEANUP(store_close) struct store_at file = STORE_NOTHING;
	bool known = false;

	if (!name[0]) {
		TRY(fs_pread(s->job->fds[s->sd->files[v->loc.file].rank], bytes, n, v->loc.offset, ""));
	} else {
		TRY(checkpoint_open_file(s->checkpoint, v->loc.file, &file));
		TRY(store_read(file, bytes, n, v->loc.offset, ""));
	}
	struct checked *c = s->checked ? s->checked : s->job ? &s->job->checked : NULL;
	if (s->checked)
		TRY(check_value(s, v, bytes, n, &known));
	if (known)
		c->verified_bytes += n;
	else if (s->checked)
		checked_unable(c, v->fqn);
	if (known || !c)
		return OK;
	char label[sizeof s->checkpoint->name + ERR_FILE_MAX];
	struct str in = file_of(s, v);
	if (s->checkpoint && s->job && reads_several(&s->job->spec)) {
		snprintf(label, sizeof label, "%s/%.*s", s->checkpoint->name, (int)num_min(in.n, ERR_FILE_MAX - 2), in.p);
		in = s->checkpoint->single ? str_of(s->checkpoint->name) : str_of(label);
	}
	checked_nothing(c, &(struct checked_place){ v->fqn, v->rank, in, sd_origin_of(s->sd, v->loc).offset, n });
	return OK;
}

enum err input_value(const struct input *s, const struct sd_value *v, void **bytes_out, uint64_t *n_out)
{
	uint64_t n = v->kind == SD_VALUE_INLINE ? v->bytes.n : v->loc.length;
	CLEANUP(mem_free_ptr) void *bytes = n <= VALUE_MAX ? mem_alloc(n) : NULL;
	char name[4096];

	TRY(sdict_check_read(s->sd, v));
	if (!bytes) {
		enum err none = n > VALUE_MAX ? ERR(LIMIT_EXCEEDED, "a value of %ju bytes", (uintmax_t)n)
					      : ERR(NO_MEMORY, "no memory for a value of %ju bytes", (uintmax_t)n);
		return err_at_fqn(none, v->fqn.p, v->fqn.n);
	}
	if (v->kind == SD_VALUE_INLINE) {
		memcpy(bytes, v->bytes.p, n);
	} else {
		const struct sd_file *f = &s->sd->files[v->loc.file];
		must(f->name.n < sizeof name);
		memcpy(name, f->name.p, f->name.n);
		name[f->name.n] = '\0';
		enum err e = read_stored(s, v, name, bytes, n);
		if (e)
			return input_at_value(s, v, e);
	}
	*bytes_out = move(bytes);
	*n_out = n;
	return OK;
}
