/* reshard_assets.c: see reshard_assets.h. Each file is a raw source of the run and a file of its target, so that it is streamed, compared
 * with its digest if dcpd wrote it, and listed in the manifest like the checkpoint's own. */
#include "ops/reshard_assets.h"

static FALLIBLE enum err report(struct job *j, const struct assets *found)
{
	json_t *names = json_array(), *left = json_array();
	int failed = json_object_set_new(j->result, "assets", names);

	for (uint64_t i = 0; i < found->files.n && !failed; i++) {
		const struct asset *a = &found->files.v[i];
		json_t *name = json_stringn(a->name.p, a->name.n);
		failed = a->left_out ? json_array_append_new(left, json_pack("{s:o, s:s}", "file", name, "why", a->left_out))
				     : json_array_append_new(names, name);
	}
	if (!failed && json_array_size(left))
		failed = json_object_set(j->result, "assets_left_out", left);
	json_decref(left);
	return failed ? ERR(NO_MEMORY, "no memory for a report") : OK;
}

static FALLIBLE enum err add_sources(struct reshard_assets *a, struct run_build *b, uint32_t dir, const struct manifest *m)
{
	a->others = mem_zalloc(a->found.files.n, sizeof *a->others);
	NEED(a->others, "no memory for %ju files", (uintmax_t)a->found.files.n);
	each(f, a->found.files.v, a->found.files.n) {
		struct build_other *o = &a->others[a->count];
		if (f->left_out)
			continue;
		*o = (struct build_other){ .name = f->name, .bytes = f->bytes };
		TRY(build_other_source(b, dir, f->name, f->bytes, m, &o->src));
		a->count++;
	}
	return OK;
}

enum err reshard_assets_add(struct job *j, const struct input *source, struct run_build *b, struct reshard_assets *out)
{
	CLEANUP(store_close) struct store_at folder = STORE_NOTHING;
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;
	bool elsewhere = j->spec.assets.name.p != NULL;
	struct str path;
	uint32_t dir;

	if (!j->spec.copy_assets)
		return OK;
	TRY(assets_open(&j->worker->stores, &j->spec.assets, source->checkpoint, &folder, &path));
	TRY(assets_list(folder, &out->found));
	if (elsewhere)
		TRY(checkpoint_manifest(folder, MANIFEST_NAME, &m));
	TRY(run_add_dir(b, folder.store->index, path, &dir));
	b->dirs.v[dir].is_source = elsewhere;
	TRY(add_sources(out, b, dir, elsewhere ? m : input_manifest(source)));
	return report(j, &out->found);
}

void reshard_assets_free(struct reshard_assets *a)
{
	assets_free(&a->found);
	mem_free(a->others);
}
