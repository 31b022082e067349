/* share.c: see share.h. */
#include "runner/share.h"

#include <dirent.h>
#include <stdlib.h>

#include "base/num.h"
#include "runner/provenance.h"
#include "store/identity.h"
#include "store/notes.h"
#include "store/owner.h"

enum { TRIES_MAX = 8, LARGE_ITEM = FILE_PLAN_SMALL + 2 * FILE_PLAN_PAGE /* of a small payload an archive is shorter */ };

/* ---------------------------------------------------------------------------------------------------------- the parent */

/* A checkpoint beside the target: the nearest step below it comes first. */
struct sibling {
	char name[256];
	uint64_t number;               /* at the end of its name; 0: none */
	bool below;
};

struct siblings {
	const char *target;
	uint64_t number;               /* the target's */
	struct sibling v[TRIES_MAX];
	size_t n;
};

static uint64_t number_of(const char *name)
{
	size_t end = strlen(name), at = end;
	uint64_t number = 0;

	while (at && name[at - 1] >= '0' && name[at - 1] <= '9')
		at--;
	return str_to_u64((struct str){ name + at, end - at }, &number) ? number : 0;
}

static bool comes_before(const struct sibling *a, const struct sibling *b)
{
	if (a->below != b->below)
		return a->below;
	if (a->number != b->number)
		return a->number > b->number;
	return strcmp(a->name, b->name) > 0;
}

/* Keeps the first TRIES_MAX. */
static enum err note_sibling(void *user, const char *name, unsigned char d_type)
{
	struct siblings *s = user;
	struct sibling one = { .number = number_of(name) };

	if (name[0] == '.' || (d_type != DT_DIR && d_type != DT_UNKNOWN) || strcmp(name, s->target) == 0 ||
	    strlen(name) >= sizeof one.name)
		return OK;
	memcpy(one.name, name, strlen(name) + 1);
	one.below = one.number < s->number;
	size_t at = s->n;
	while (at && comes_before(&one, &s->v[at - 1]))
		at--;
	if (at == TRIES_MAX)
		return OK;
	s->n = num_min(s->n + 1, TRIES_MAX);
	memmove(&s->v[at + 1], &s->v[at], (s->n - at - 1) * sizeof *s->v);
	s->v[at] = one;
	return OK;
}

/* Is the file what the manifest tells? gone: the answer if it is not there. */
static bool is_untouched(struct store_at dir, struct str file, uint64_t bytes, int64_t mtime_ns, bool gone)
{
	char name[ERR_FILE_MAX];
	struct stat st;
	int64_t ns;

	if (file.n >= sizeof name || !mtime_ns)
		return false;
	memcpy(name, file.p, file.n);
	name[file.n] = '\0';
	enum err e = store_stat(dir, name, &st);
	if (e) {
		err_clear();
		return e == ERR_NOT_FOUND && gone;
	}
	return S_ISREG(st.st_mode) && (uint64_t)st.st_size == bytes &&
	       !__builtin_mul_overflow((int64_t)st.st_mtim.tv_sec, 1000000000, &ns) &&
	       !__builtin_add_overflow(ns, (int64_t)st.st_mtim.tv_nsec, &ns) && ns == mtime_ns;
}

/* Reads the checkpoint's manifest. Sets s->manifest if bytes can be shared with it, else s->why. */
static FALLIBLE enum err look_at(const struct job *j, const struct store *store, const char *name, struct share *s)
{
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;
	char identity[IDENTITY_MAX];
	uid_t owner = (uid_t)-1;
	struct stat st;
	bool any = false;

	TRY(store_enter(store_top(store), name, &dir));
	TRY(owner_find(store, name, j->uid, &owner)); /* first: another user's manifest may be of any size */
	s->why = "the parent is another user's";
	if (owner != j->uid)
		return OK;
	TRY(checkpoint_manifest(dir, MANIFEST_NAME, &m));
	s->why = "the parent has no manifest of dcpd's";
	if (!m || strcmp(m->metadata_name, DCP_METADATA) != 0)
		return OK;
	TRY(store_stat(dir, m->metadata_name, &st));
	TRY(identity_of(store_top(store), name, identity));
	s->why = "the parent is damaged, as a verify has found";
	s->damaged = notes_tell_damage(dir, identity, m->job);
	if (s->damaged)
		return OK;
	s->usable = mem_zalloc(m->files.n, sizeof *s->usable);
	NEED(s->usable, "no memory for %ju files", (uintmax_t)m->files.n);
	for (uint64_t i = 0; i < m->files.n; i++) {
		const struct manifest_file *f = &m->files.v[i];
		any |= s->usable[i] = is_untouched(dir, f->name, f->bytes, f->mtime_ns, false);
	}
	s->why = "the parent's files were copied, or written to, since they were saved";
	if (!any || snprintf(s->name, sizeof s->name, "%s", name) >= (int)sizeof s->name)
		return OK;
	s->manifest = move(m);
	s->why = NULL;
	return OK;
}

/* The same of one that nobody has named: what cannot be read is passed over. */
static FALLIBLE enum err try_one(const struct job *j, const struct store *store, const char *folder, const char *last, struct share *s)
{
	char name[CHECKPOINT_NAME_MAX];

	if (snprintf(name, sizeof name, "%s%s%s", folder, folder[0] ? "/" : "", last) >= (int)sizeof name)
		return OK;
	mem_free(s->usable);
	s->usable = NULL;
	enum err e = look_at(j, store, name, s);
	if (e == ERR_NO_MEMORY)
		return e;
	if (e) {
		s->why = "no earlier checkpoint of the run can be read";
		err_clear();
	}
	return OK;
}

/* The checkpoint that is to be replaced is the nearest; else the steps beside it. */
static FALLIBLE enum err find_parent(const struct job *j, const struct staging *st, struct share *s)
{
	CLEANUP(store_close) struct store_at parent = STORE_NOTHING;
	struct siblings *all = mem_zalloc(1, sizeof *all);
	const struct ref *named = &j->spec.parent;

	CLEANUP(mem_free_ptr) void *freed = all;
	NEED(all, "no memory for names");
	if (named->kind)
		return look_at(j, st->store, named->name.p, s);
	s->why = "there is no earlier checkpoint of the run";
	if (j->spec.overwrite)
		TRY(try_one(j, st->store, st->parent_path, st->target, s));
	if (s->manifest || s->damaged)
		return OK;
	all->target = st->target;
	all->number = number_of(st->target);
	all->number = all->number ? all->number : UINT64_MAX;
	enum err e = store_enter(store_top(st->store), st->parent_path, &parent);
	if (e == ERR_NOT_FOUND) { /* in object storage a folder is there with its first checkpoint */
		err_clear();
		return OK;
	}
	TRY(e);
	TRY(store_list(parent, note_sibling, all));
	for (size_t i = 0; i < all->n && !s->manifest && !s->damaged; i++) /* one before a damaged one may have the same bytes */
		TRY(try_one(j, st->store, st->parent_path, all->v[i].name, s));
	return OK;
}

/* Chooses the way. A request without the option shares where that costs nothing and harms nobody. */
static void choose(const struct job *j, const struct staging *st, bool alone, struct share *s)
{
	const struct store_ops *ops = st->store->ops;

	s->wanted = j->spec.incremental;
	s->why = NULL;
	if (!j->spec.may_share)
		return;
	if (!alone || st->in_place) {
		s->why = alone ? "a save beside other files shares none" : "ranks on several hosts write it";
		return;
	}
	if (ops->clone && ops->clones(st->dir)) {
		s->how = SHARE_CLONES;
		return;
	}
	if (!s->wanted || !ops->link) {
		s->why = "the storage can neither clone nor link files";
		return;
	}
	s->how = SHARE_LINKS;
	s->cuts = true;
	s->copies = ops->link_copies;
}

enum err share_open(const struct job *j, const struct staging *st, bool alone, struct share *out)
{
	*out = (struct share){ .how = SHARE_NOTHING };
	if (j->kind != JOB_SAVE)
		return OK;
	choose(j, st, alone, out);
	if (out->how == SHARE_NOTHING)
		return OK;
	TRY(find_parent(j, st, out));
	const struct ref parent = ref_checkpoint(j->spec.target.storage.p, out->name);
	if (out->manifest)
		TRY(provenance_parent(j, "previous", &parent, &out->previous));
	if (!out->manifest)
		out->how = SHARE_NOTHING;
	else if (out->how == SHARE_LINKS && out->manifest->unsynced && j->spec.sync_files)
		*out = (struct share){ .how = SHARE_NOTHING, .wanted = true, .cuts = true, .why = "the parent was saved without fsync",
				       .manifest = out->manifest, .previous = out->previous, .usable = out->usable };
	return OK;
}

void share_close(struct share *s)
{
	manifest_free(s->manifest);
	json_decref(s->previous);
	mem_free(s->usable);
	*s = (struct share){ .how = SHARE_NOTHING };
}

/* ---------------------------------------------------------------------------------------------------------- the tables */

static void take_out(struct run_build *b, struct share_marks *marks)
{
	if (marks->set) {
		b->dirs.n = marks->dirs;
		b->files.n = marks->files;
		b->digests.n = marks->digests;
	}
	*marks = (struct share_marks){ true, b->dirs.n, b->files.n, b->digests.n };
	b->bases.n = b->file_blocks.n = 0;
	each(f, b->files.v, b->files.n)
		f->base = f->sparse = 0;
	each(p, b->parts.v, b->parts.n)
		p->base = 0;
	each(d, b->dsts.v, b->dsts.n)
		d->edges_base = 0;
}

/* Adds a file of the parent's as a source. */
static FALLIBLE enum err add_file(const struct share *s, struct run_build *b, uint32_t dir, uint64_t file, uint32_t *out)
{
	const struct manifest_file *f = &s->manifest->files.v[file];

	TRY(run_add_file(b, RUN_FILE_SOURCE, dir, f->name, f->bytes, out));
	b->files.v[*out].mtime_ns = f->mtime_ns;
	return OK;
}

/* ---- clones ---- */

static int by_digest(const void *a, const void *b)
{
	const struct run_base *x = a, *y = b;
	int order = memcmp(x->xxh3_128, y->xxh3_128, sizeof x->xxh3_128);

	return order ? order : num_order(x->bytes, y->bytes) ?: num_order(x->file, y->file) ?: num_order(x->offset, y->offset);
}

/* Blocks of an item. Its payload is all of it, or begins on its second page (file_plan.h, torch_item.h); what is small is not worth it. */
static FALLIBLE enum err add_bases(struct run_build *b, const struct manifest *m, const struct manifest_item *item, uint32_t file)
{
	uint64_t begin = 0, at = item->offset + (item->raw ? 0 : FILE_PLAN_PAGE);
	struct run_base *base;

	if (item->length < LARGE_ITEM || item->offset % FILE_PLAN_PAGE)
		return OK;
	for (uint32_t i = 0; i < item->digest_count; i++) {
		const struct block_digest *d = &m->digests.v[item->digest_at + i];
		TRY(vec_push(&b->bases, &base));
		*base = (struct run_base){ .file = file, .offset = at + begin, .bytes = d->end == UINT64_MAX ? 0 : d->end - begin };
		memcpy(base->xxh3_128, d->xxh3_128, sizeof base->xxh3_128);
		begin = d->end;
	}
	return OK;
}

static FALLIBLE enum err build_clones(const struct share *s, struct run_build *b, uint32_t dir)
{
	const struct manifest *m = s->manifest;
	uint64_t targets = b->files.n;
	uint32_t file;

	for (uint64_t i = 0; i < m->files.n; i++) {
		const struct manifest_file *f = &m->files.v[i];
		if (!s->usable[i])
			continue;
		TRY(add_file(s, b, dir, i, &file));
		for (uint64_t k = 0; k < f->item_count; k++)
			TRY(add_bases(b, m, &m->items.v[f->first_item + k], file));
	}
	qsort(b->bases.v, b->bases.n, sizeof *b->bases.v, by_digest);
	for (uint64_t i = 0; i < targets && b->bases.n; i++)
		b->files.v[i].sparse = b->files.v[i].kind == RUN_FILE_TARGET;
	return OK;
}

/* ---- links ---- */

/* Has the parent's file an item at this place, of the same form, in the same blocks? */
static const struct manifest_item *twin_of(const struct manifest *m, const struct manifest_file *f, const struct run_build *b,
					   const struct run_dst *d)
{
	const struct manifest_item *item = manifest_find(m, f->name, d->offset, d->length);
	bool is_raw = d->bare || d->kind == RUN_DST_RAW;

	if (!item || item->raw != is_raw || item->has_edges == is_raw || item->digest_count != d->part_count)
		return NULL;
	for (uint64_t i = 0; i < d->part_count && d->part_count > 1; i++)
		if (m->digests.v[item->digest_at + i].end != b->parts.v[d->first_part + i].end)
			return NULL;
	return item;
}

static FALLIBLE enum err add_digest(struct run_build *b, const unsigned char xxh3[16], uint32_t *at_out)
{
	struct block_digest *d;

	TRY(vec_push(&b->digests, &d));
	*d = (struct block_digest){ .end = 0 };
	memcpy(d->xxh3_128, xxh3, sizeof d->xxh3_128);
	*at_out = (uint32_t)b->digests.n;
	return OK;
}

/* The n of "__{rank}_{n}.distcp"; 0: it is none, or another name. */
static uint64_t data_number(struct str name, uint64_t *rank_out)
{
	const char *bar = str_starts(name, "__") ? memchr(name.p + 2, '_', name.n - 2) : NULL, *end = name.p + name.n - strlen(".distcp");
	uint64_t n = 0;

	if (!bar || !str_ends(name, ".distcp") || end < bar + 1 ||
	    !str_to_u64((struct str){ name.p + 2, (size_t)(bar - name.p) - 2 }, rank_out))
		return 0;
	return str_to_u64((struct str){ bar + 1, (size_t)(end - bar) - 1 }, &n) ? n : 0;
}

/* The parent's file in the place of the one of this name. */
static uint32_t twin_file(const struct share *s, struct str name)
{
	char twin[FORMAT_FILE_MAX];
	uint64_t rank;

	if (!s->number)
		return map_get(&s->manifest->names, name);
	uint64_t n = data_number(name, &rank);
	if (n < s->number || rank > UINT32_MAX)
		return MAP_NONE;
	format_dcp_payload((uint32_t)rank, s->base + (n - s->number), twin);
	return map_get(&s->manifest->names, str_of(twin));
}

/* The least number of the parent's data files. */
static void set_numbers(struct share *s, const struct staging *st)
{
	uint64_t rank;

	s->number = st->number;
	s->base = UINT64_MAX;
	for (uint64_t i = 0; i < s->manifest->files.n; i++) {
		uint64_t n = data_number(s->manifest->files.v[i].name, &rank);
		s->base = n ? num_min(s->base, n) : s->base;
	}
	s->base = s->base == UINT64_MAX ? 0 : s->base;
}

/* Notes the digests that the file's targets [first, end) must have. */
static FALLIBLE enum err match_file(const struct share *s, struct run_build *b, uint32_t dir, uint64_t first, uint64_t end)
{
	struct run_file *f = &b->files.v[b->dsts.v[first].file];
	const struct manifest *m = s->manifest;
	uint32_t index = twin_file(s, (struct str){ b->strings.v + f->name_at, f->name_len }), file;

	if (index == MAP_NONE || !s->usable[index] || m->files.v[index].bytes != f->bytes || m->files.v[index].item_count != end - first)
		return OK;
	for (uint64_t i = first; i < end; i++)
		if (!twin_of(m, &m->files.v[index], b, &b->dsts.v[i]))
			return OK;
	for (uint64_t i = first; i < end; i++) {
		struct run_dst *d = &b->dsts.v[i];
		const struct manifest_item *item = twin_of(m, &m->files.v[index], b, d);
		for (uint64_t k = 0; k < d->part_count; k++)
			TRY(add_digest(b, m->digests.v[item->digest_at + k].xxh3_128, &b->parts.v[d->first_part + k].base));
		if (item->has_edges)
			TRY(add_digest(b, item->edges, &d->edges_base));
	}
	uint32_t at = b->dsts.v[first].file;
	TRY(add_file(s, b, dir, index, &file));
	f = &b->files.v[at];
	f->base = file + 1;
	f->first_dst = (uint32_t)first;
	f->dst_count = (uint32_t)(end - first);
	return OK;
}

/* Lists the blocks of each file that has a base. */
static FALLIBLE enum err list_blocks(struct run_build *b)
{
	uint64_t at = 0, *block;

	each(k, b->blocks.v, b->blocks.n)
		b->files.v[k->file].block_count = 0;
	each(k, b->blocks.v, b->blocks.n)
		b->files.v[k->file].block_count++;
	each(f, b->files.v, b->files.n) {
		f->first_block = at;
		at += f->base ? f->block_count : 0;
		f->block_count = 0;
	}
	for (uint64_t i = 0; i < at; i++)
		TRY(vec_push(&b->file_blocks, &block));
	for (uint64_t i = 0; i < b->blocks.n; i++) {
		struct run_file *f = &b->files.v[b->blocks.v[i].file];
		if (f->base)
			b->file_blocks.v[f->first_block + f->block_count++] = i;
	}
	return OK;
}

/* Bytes that come through a ring are gone when the last block of a file says whether the others were needed. */
static bool has_ring(const struct run_build *b)
{
	each(f, b->files.v, b->files.n)
		if (f->ring_bytes)
			return true;
	return false;
}

static FALLIBLE enum err build_links(struct share *s, const struct staging *st, struct run_build *b, uint32_t dir)
{
	uint64_t end;

	if (has_ring(b)) {
		s->how = SHARE_NOTHING;
		s->why = "a ring brings the bytes, and whole files are compared before they are written";
		return OK;
	}
	if (st->number)
		set_numbers(s, st);
	for (uint64_t i = 0; i < b->dsts.n; i = end) {
		for (end = i + 1; end < b->dsts.n && b->dsts.v[end].file == b->dsts.v[i].file;)
			end++;
		if (b->dsts.v[i].file != UINT32_MAX)
			TRY(match_file(s, b, dir, i, end));
	}
	return list_blocks(b);
}

enum err share_build(struct share *s, const struct staging *st, struct run_build *b, struct share_marks *marks)
{
	uint32_t dir;

	take_out(b, marks);
	if (s->how == SHARE_NOTHING)
		return OK;
	TRY(run_add_dir(b, st->store->index, str_of(s->name), &dir));
	b->dirs.v[dir].is_source = true;
	return s->how == SHARE_CLONES ? build_clones(s, b, dir) : build_links(s, st, b, dir);
}

/* ---------------------------------------------------------------------------------------------------------- the result */

/* Did nobody write to the parent's files while bytes of theirs were taken? Who has removed them since has not changed them. */
static FALLIBLE enum err check_untouched(const struct share *s, const struct staging *st, const struct run *run)
{
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	bool clones = s->how == SHARE_CLONES;

	enum err e = clones ? store_enter(store_top(st->store), s->name, &dir) : OK;
	if (e == ERR_NOT_FOUND)
		err_clear();
	else if (e)
		return e;
	each(f, run->files, run->files_n) {
		const struct run_file *is = f->base ? &run->files[f->base - 1] : f;
		bool linked = f->base && !s->copies && atomic_load(&f->differs) == RUN_UNDECIDED;
		bool cloned = clones && !e && f->kind == RUN_FILE_SOURCE && f->mtime_ns;
		if ((linked || cloned) && !is_untouched(linked ? st->dir : dir, run_file_name(run, f), is->bytes, is->mtime_ns, cloned))
			return ERR(CHECKPOINT_REPLACED, "the files of '%s' were written to while the save shared them", s->name);
	}
	return OK;
}

enum err share_note(const struct share *s, struct job *j, const struct staging *st, const struct run *run)
{
	j->bytes_shared = atomic_load(&run->head->shared_bytes);
	j->shares = s->wanted || j->bytes_shared;
	if (!j->bytes_shared)
		return OK;
	TRY(check_untouched(s, st, run));
	return provenance_add(j, s->previous);
}

enum err share_report(const struct share *s, const struct job *j, const struct run *run, json_t *result)
{
	static const char *const words[] = { "none", "reflink", "link" };
	uint64_t bytes = atomic_load(&run->head->shared_bytes);
	json_t *doc;

	if (j->kind != JOB_SAVE)
		return OK;
	bool ok = json_object_set_new(result, "bytes_shared", json_integer((json_int_t)bytes)) == 0;
	if (!s->wanted && !bytes)
		return ok ? OK : ERR(NO_MEMORY, "no memory for the result");
	doc = json_pack("{s:s}", "how", s->how == SHARE_LINKS && s->copies ? "copy" : words[s->how]);
	ok = ok && doc && (!s->why || json_object_set_new(doc, "reason", json_string(s->why)) == 0);
	if (ok && s->how != SHARE_NOTHING) {
		struct ref parent = ref_checkpoint(j->spec.target.storage.p, s->name);
		ok = json_object_set_new(doc, "parent", ref_doc(&parent)) == 0;
	}
	ok = ok && json_object_set(result, "incremental", doc) == 0;
	json_decref(doc);
	return ok ? OK : ERR(NO_MEMORY, "no memory for the result");
}
