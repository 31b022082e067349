/* spec.c: see spec.h.
 *
 * One function per kind reads like that kind's row of SURFACES. A field that a kind does not use is unknown to it: a caller who
 * writes "layout" in a save would otherwise believe that it was obeyed. */
#include "spec/spec.h"

#include <stdio.h>

#include "spec/layout_rules.h"
#include "spec/spec_own.h"
#include "base/near.h"
#include "tensor/dtype.h"

enum { GLOBS_MAX = 1024, GLOB_BYTES_MAX = 4096, PARTS_MAX = 4096, HOSTS_MAX = 1024 };

static const char *const formats[] = { "dcp", "safetensors", NULL };
FALLIBLE enum err spec_put_default(json_t *object, const char *key, json_t *fallback_new)
{
	if (!fallback_new)
		return ERR(NO_MEMORY, "cannot fill in %s", key);
	if (json_object_get(object, key)) {
		json_decref(fallback_new);
		return OK;
	}
	if (json_object_set_new(object, key, fallback_new) != 0)
		return ERR(NO_MEMORY, "cannot fill in %s", key);
	return OK;
}

FALLIBLE enum err spec_check_labels(const struct jval *v)
{
	const char *key;
	json_t *value;

	if (!v->j)
		return OK;
	if (!json_is_object(v->j))
		return jval_only(v, (const char *const[]){ NULL });
	if (json_object_size(v->j) > 32)
		return jval_fail(v, ERR_VALIDATION_FAILED, "more than 32 labels");
	json_object_foreach(v->j, key, value) {
		struct jval item = { value, v, key, 0 };
		struct str text;
		if (key[0] == '\0' || strlen(key) > 64)
			return jval_fail(&item, ERR_VALIDATION_FAILED, "a label's key has 1 to 64 bytes");
		TRY(jval_string(&item, &text));
		if (text.n > 256)
			return jval_fail(&item, ERR_VALIDATION_FAILED, "a label's value has at most 256 bytes");
	}
	return OK;
}

static FALLIBLE enum err check_dtype(const struct jval *v, struct str name)
{
	struct near near = near_begin(name);
	char hint[NEAR_HINT_MAX];

	for (int d = 0; d < DT_COUNT; d++) {
		if (str_is(name, dtype_name((enum dtype)d)))
			return OK;
		near_try(&near, str_of(dtype_name((enum dtype)d)));
	}
	return jval_fail(v, ERR_VALIDATION_FAILED, "\"%.32s\" is no dtype, such as \"bfloat16\"%s", name.p, near_text(&near, hint));
}

/* rename: [[pattern, replacement], …]; dtype: [[glob, dtype], …]. */
static FALLIBLE enum err check_pairs(const struct jval *doc, const char *key, bool is_dtype)
{
	struct jval list = jval_get(doc, key);
	size_t n = 0, two = 0;

	if (!list.j)
		return OK;
	TRY(jval_array(&list, GLOBS_MAX, &n));
	for (size_t i = 0; i < n; i++) {
		struct jval pair = jval_at(&list, i), left = jval_at(&pair, 0), right = jval_at(&pair, 1);
		struct str a, b;
		TRY(jval_array(&pair, 2, &two));
		if (two != 2)
			return jval_fail(&pair, ERR_VALIDATION_FAILED, "must be a pair of strings");
		TRY(jval_string(&left, &a));
		TRY(jval_string(&right, &b));
		if (a.n == 0 || a.n > GLOB_BYTES_MAX || b.n > GLOB_BYTES_MAX)
			return jval_fail(&pair, ERR_VALIDATION_FAILED, "patterns have 1 to %d bytes", GLOB_BYTES_MAX);
		if (is_dtype)
			TRY(check_dtype(&right, b));
	}
	return OK;
}

/* What picks and changes entries: include, exclude, rename, dtype. */
static FALLIBLE enum err check_selection(const struct jval *doc)
{
	TRY(jval_opt_texts(doc, "include", GLOBS_MAX, GLOB_BYTES_MAX));
	TRY(jval_opt_texts(doc, "exclude", GLOBS_MAX, GLOB_BYTES_MAX));
	TRY(check_pairs(doc, "rename", false));
	TRY(check_pairs(doc, "dtype", true));
	TRY(spec_put_default(doc->j, "include", json_array()));
	TRY(spec_put_default(doc->j, "exclude", json_array()));
	TRY(spec_put_default(doc->j, "rename", json_array()));
	return spec_put_default(doc->j, "dtype", json_array());
}

/* options: those of `keys` are allowed; each has one meaning wherever it is. */
FALLIBLE enum err spec_check_options(const struct jval *doc, const char *const *keys)
{
	TRY(spec_put_default(doc->j, "options", json_object()));

	struct jval o = jval_get(doc, "options");
	bool overwrite = false;
	int64_t files = 1, retries = 1;
	size_t divergence = 0, verify = 1, dedup = 0, beside = 0, pace = 0;
	bool flatten = true, sync_files = true;
	static const char *const besides[] = { "never", "needed", "always", NULL };
	static const char *const paces[] = { "full", "background", NULL };
	static const char *const dedups[] = { "balanced", "lowest_rank", NULL };
	static const char *const divergences[] = { "report", "fail", NULL }, *const verifies[] = { "none", "digest", NULL };

	TRY(jval_only(&o, keys));
	TRY(jval_opt_bool(&o, "overwrite", &overwrite));
	TRY(jval_opt_integer(&o, "files_per_rank", 1, 64, &files));
	TRY(jval_opt_integer(&o, "retries", 0, 10, &retries));
	TRY(jval_opt_word(&o, "on_divergence", divergences, &divergence));
	TRY(jval_opt_word(&o, "verify", verifies, &verify));
	TRY(jval_opt_word(&o, "dedup", dedups, &dedup));
	TRY(jval_opt_bool(&o, "flatten_state_dict", &flatten));
	TRY(jval_opt_word(&o, "beside", besides, &beside));
	TRY(jval_opt_bool(&o, "sync_files", &sync_files));
	TRY(jval_opt_word(&o, "pace", paces, &pace));
	for (size_t i = 0; keys[i]; i++) {
		const char *k = keys[i];
		if (strcmp(k, "overwrite") == 0)
			TRY(spec_put_default(o.j, k, json_boolean(overwrite)));
		else if (strcmp(k, "files_per_rank") == 0)
			TRY(spec_put_default(o.j, k, json_integer(files)));
		else if (strcmp(k, "retries") == 0)
			TRY(spec_put_default(o.j, k, json_integer(retries)));
		else if (strcmp(k, "on_divergence") == 0)
			TRY(spec_put_default(o.j, k, json_string(divergences[divergence])));
		else if (strcmp(k, "dedup") == 0)
			TRY(spec_put_default(o.j, k, json_string(dedups[dedup])));
		else if (strcmp(k, "flatten_state_dict") == 0)
			TRY(spec_put_default(o.j, k, json_boolean(flatten)));
		else if (strcmp(k, "beside") == 0)
			TRY(spec_put_default(o.j, k, json_string(besides[beside])));
		else if (strcmp(k, "sync_files") == 0)
			TRY(spec_put_default(o.j, k, json_boolean(sync_files)));
		else if (strcmp(k, "pace") == 0)
			TRY(spec_put_default(o.j, k, json_string(paces[pace])));
		else
			TRY(spec_put_default(o.j, k, json_string(verifies[verify])));
	}
	return OK;
}

/* world_size and layout of a target. */
static FALLIBLE enum err check_world(const struct jval *target)
{
	struct jval layout = jval_get(target, "layout");
	int64_t world = 0;

	TRY(jval_opt_integer(target, "world_size", 1, LAYOUT_WORLD_MAX, &world));
	TRY(layout_rules_check(&layout, &world));
	TRY(spec_put_default(target->j, "layout", json_array()));
	return world > 0 ? spec_put_default(target->j, "world_size", json_integer(world)) : OK;
}

static FALLIBLE enum err check_format(const struct jval *target)
{
	struct jval v = jval_get(target, "format");
	size_t format = 0;

	if (v.j && json_is_string(v.j) && strcmp(json_string_value(v.j), "torch") == 0)
		return jval_fail(&v, ERR_FORMAT_UNSUPPORTED, "checkpoints cannot be written as \"torch\", only as: dcp, safetensors");
	TRY(jval_opt_word(target, "format", formats, &format));
	return spec_put_default(target->j, "format", json_string(formats[format]));
}

/* A save writes what trainers write; other formats are made of that by a reshard. */
FALLIBLE enum err spec_check_save_format(const struct jval *target)
{
	struct jval format = jval_get(target, "format");

	TRY(check_format(target));
	format.j = json_object_get(target->j, "format");
	if (strcmp(json_string_value(format.j), "dcp") != 0)
		return jval_fail(&format, ERR_VALIDATION_FAILED, "a save writes \"dcp\"; reshard what it wrote to another format");
	return OK;
}

/* A planned save: the state dict is a list of items, the parts hold their bytes (worker/ops/planned_save.h). */
static FALLIBLE enum err check_parts(const struct jval *source)
{
	struct jval parts = jval_get(source, "parts");
	size_t count = 0;

	if (!parts.j)
		return OK;
	TRY(jval_array(&parts, PARTS_MAX, &count));
	for (size_t i = 0; i < count; i++) {
		struct jval part = jval_at(&parts, i), generation = jval_get(&part, "generation");
		struct ref ref;
		int64_t number;
		TRY(ref_read(&part, REF_STATE_DICT, (const char *const[]){ "generation", NULL }, &ref));
		TRY(jval_integer(&generation, 0, INT64_MAX, &number));
	}
	return OK;
}

static const char *const save_options[] = { "overwrite", "files_per_rank", "on_divergence", "dedup", "flatten_state_dict",
					     "retries", "beside", "sync_files", "pace", NULL };

/* A save whose ranks are on several hosts (worker/runner/hosts.h): which of them this daemon has. */
static FALLIBLE enum err check_hosts(const struct jval *doc)
{
	struct jval h = jval_get(doc, "hosts"), id = jval_get(&h, "id"), ranks = jval_get(&h, "ranks"), index = jval_get(&h, "index");
	int64_t number = 0, timeout_s = 20;
	size_t count = 0, some = 0;
	bool part = false;
	struct str text;

	if (!h.j)
		return OK;
	TRY(jval_only(&h, (const char *const[]){ "id", "part", "index", "names", "ranks", "timeout_s", NULL }));
	TRY(jval_string(&id, &text));
	if (text.n < 8 || text.n > 64 || strspn(text.p, "abcdefghijklmnopqrstuvwxyz0123456789-") != text.n)
		return jval_fail(&id, ERR_VALIDATION_FAILED, "has 8 to 64 of a-z, 0-9 and -");
	TRY(jval_opt_bool(&h, "part", &part));
	if (part && !json_object_get(json_object_get(doc->j, "source"), "parts"))
		return jval_fail(&h, ERR_VALIDATION_FAILED, "a part is of a planned save, which has source.parts");
	if (part)
		return jval_only(&h, (const char *const[]){ "id", "part", NULL });
	TRY(jval_array(&ranks, HOSTS_MAX, &count));
	if (count < 2)
		return jval_fail(&ranks, ERR_VALIDATION_FAILED, "needs the ranks of 2 hosts or more");
	for (size_t i = 0; i < count; i++) {
		struct jval one = jval_at(&ranks, i);
		TRY(jval_array(&one, LAYOUT_WORLD_MAX, &some));
		for (size_t k = 0; k < some; k++) {
			struct jval rank = jval_at(&one, k);
			TRY(jval_integer(&rank, 0, LAYOUT_WORLD_MAX - 1, &number));
		}
	}
	TRY(jval_opt_texts(&h, "names", count, 256));
	TRY(jval_integer(&index, 0, (int64_t)count - 1, &number));
	TRY(jval_opt_integer(&h, "timeout_s", 1, 3600, &timeout_s));
	return spec_put_default(h.j, "timeout_s", json_integer(timeout_s));
}

FALLIBLE enum err spec_check_save_wish(const struct jval *save)
{
	struct jval labels = jval_get(save, "labels");
	struct ref ref;

	TRY(ref_read(save, REF_CHECKPOINT, (const char *const[]){ "format", "options", "labels", "hosts", NULL }, &ref));
	TRY(check_hosts(save));
	TRY(spec_check_save_format(save));
	TRY(spec_check_labels(&labels));
	return spec_check_options(save, save_options);
}

/* {"await_seal": true}: the job is made before its generation is sealed, and waits for that. */
static FALLIBLE enum err check_await_seal(const struct jval *doc, const struct jval *source)
{
	struct jval wish = jval_get(source, "await_seal"), generation = jval_get(source, "generation");
	struct jval timeout = jval_get(source, "timeout_s");
	int64_t number = 0, timeout_s = 600;
	bool wanted = false;

	TRY(jval_opt_bool(source, "await_seal", &wanted));
	TRY(jval_opt_integer(source, "timeout_s", 1, 86400, &timeout_s));
	if (!wanted && timeout.j)
		return jval_fail(&timeout, ERR_VALIDATION_FAILED, "is how long await_seal waits");
	if (!wanted)
		return OK;
	TRY(jval_integer(&generation, 0, INT64_MAX, &number));
	if (json_object_get(source->j, "parts"))
		return jval_fail(&wish, ERR_VALIDATION_FAILED, "a planned save is of what is sealed already");
	if (json_object_get(doc->j, "hosts"))
		return jval_fail(&wish, ERR_VALIDATION_FAILED, "a save by several hosts is of what is sealed already");
	return spec_put_default(source->j, "timeout_s", json_integer(timeout_s));
}

static FALLIBLE enum err check_save(const struct jval *doc, struct spec *s)
{
	struct jval source = jval_get(doc, "source"), target = jval_get(doc, "target");
	int64_t generation = 0;

	TRY(jval_only(doc, (const char *const[]){ "kind", "labels", "source", "target", "options", "include", "exclude",
						  "rename", "dtype", "hosts", NULL }));
	TRY(check_hosts(doc));
	TRY(ref_read(&source, REF_STATE_DICT, (const char *const[]){ "generation", "parts", "await_seal", "timeout_s", NULL }, &s->source));
	TRY(jval_opt_integer(&source, "generation", 0, INT64_MAX, &generation));
	TRY(check_await_seal(doc, &source));
	TRY(check_parts(&source));
	TRY(ref_read(&target, REF_CHECKPOINT, (const char *const[]){ "format", NULL }, &s->target));
	TRY(spec_check_save_format(&target));
	TRY(check_selection(doc));
	return spec_check_options(doc, save_options);
}

/* {"key","model":{"state_dict"}}: the model says how the optimizer's tensors are cut, so that a layout would contradict it. */
static FALLIBLE enum err check_optimizer(const struct jval *doc, const struct jval *target)
{
	struct jval o = jval_get(doc, "optimizer"), model = jval_get(&o, "model"), key = jval_get(&o, "key");
	struct jval layout = jval_get(target, "layout");
	struct ref ref;
	struct str text;

	if (!o.j)
		return OK;
	TRY(jval_only(&o, (const char *const[]){ "key", "model", NULL }));
	TRY(jval_string(&key, &text));
	if (text.n == 0 || text.n > GLOB_BYTES_MAX)
		return jval_fail(&key, ERR_VALIDATION_FAILED, "a key has 1 to %d bytes", GLOB_BYTES_MAX);
	TRY(ref_read(&model, REF_STATE_DICT, NULL, &ref));
	if (layout.j)
		return jval_fail(&layout, ERR_VALIDATION_FAILED, "the layout of optimizer state follows from its model");
	return OK;
}

static FALLIBLE enum err check_load(const struct jval *doc, struct spec *s)
{
	struct jval source = jval_get(doc, "source"), target = jval_get(doc, "target");
	int64_t lease_s = 0;
	bool strict = true;

	TRY(jval_only(doc, (const char *const[]){ "kind", "labels", "source", "target", "options", "include", "exclude",
						  "rename", "dtype", "strict", "optimizer", NULL }));
	TRY(ref_read(&source, REF_CHECKPOINT, NULL, &s->source));
	TRY(ref_read(&target, REF_STATE_DICT, (const char *const[]){ "world_size", "layout", "lease_seconds", NULL }, &s->target));
	TRY(check_optimizer(doc, &target));
	TRY(check_world(&target));
	TRY(jval_opt_integer(&target, "lease_seconds", 1, 86400, &lease_s));
	TRY(jval_opt_bool(doc, "strict", &strict));
	TRY(spec_put_default(doc->j, "strict", json_boolean(strict)));
	TRY(check_selection(doc));
	return spec_check_options(doc, (const char *const[]){ "retries", "verify", "pace", NULL });
}

static FALLIBLE enum err check_reshard(const struct jval *doc, struct spec *s)
{
	struct jval source = jval_get(doc, "source"), target = jval_get(doc, "target");

	TRY(jval_only(doc, (const char *const[]){ "kind", "labels", "source", "target", "options", "include", "exclude",
						  "rename", "dtype", NULL }));
	TRY(ref_read(&source, REF_CHECKPOINT, NULL, &s->source));
	TRY(ref_read(&target, REF_CHECKPOINT, (const char *const[]){ "format", "world_size", "layout", NULL }, &s->target));
	if (str_eq(s->source.storage, s->target.storage) && str_eq(s->source.name, s->target.name))
		return jval_fail(&target, ERR_VALIDATION_FAILED, "is the source itself");
	TRY(check_format(&target));
	TRY(check_world(&target));
	TRY(check_selection(doc));
	return spec_check_options(doc, (const char *const[]){ "overwrite", "files_per_rank", "dedup", "retries", "verify", "pace", NULL });
}

static FALLIBLE enum err check_verify(const struct jval *doc, struct spec *s)
{
	static const char *const levels[] = { "structure", "digest", "values", NULL };
	struct jval source = jval_get(doc, "source");
	size_t level = 1;

	TRY(jval_only(doc, (const char *const[]){ "kind", "labels", "source", "level", "include", "exclude", "options",
						  NULL }));
	TRY(ref_read(&source, REF_CHECKPOINT, NULL, &s->source));
	TRY(jval_opt_word(doc, "level", levels, &level));
	TRY(spec_put_default(doc->j, "level", json_string(levels[level])));
	TRY(jval_opt_texts(doc, "include", GLOBS_MAX, GLOB_BYTES_MAX));
	TRY(jval_opt_texts(doc, "exclude", GLOBS_MAX, GLOB_BYTES_MAX));
	TRY(spec_put_default(doc->j, "include", json_array()));
	TRY(spec_put_default(doc->j, "exclude", json_array()));
	return spec_check_options(doc, (const char *const[]){ "retries", "pace", NULL });
}

static FALLIBLE enum err check_diff(const struct jval *doc, struct spec *s)
{
	struct jval a = jval_get(doc, "a"), b = jval_get(doc, "b");
	double rtol = 0, atol = 0;

	TRY(jval_only(doc, (const char *const[]){ "kind", "labels", "a", "b", "rtol", "atol", "include", "exclude",
						  "options", NULL }));
	TRY(ref_read(&a, REF_CHECKPOINT | REF_STATE_DICT, NULL, &s->a));
	TRY(ref_read(&b, REF_CHECKPOINT | REF_STATE_DICT, NULL, &s->b));
	TRY(jval_opt_number(doc, "rtol", 0, &rtol));
	TRY(jval_opt_number(doc, "atol", 0, &atol));
	TRY(spec_put_default(doc->j, "rtol", json_real(rtol)));
	TRY(spec_put_default(doc->j, "atol", json_real(atol)));
	TRY(jval_opt_texts(doc, "include", GLOBS_MAX, GLOB_BYTES_MAX));
	TRY(jval_opt_texts(doc, "exclude", GLOBS_MAX, GLOB_BYTES_MAX));
	TRY(spec_put_default(doc->j, "include", json_array()));
	TRY(spec_put_default(doc->j, "exclude", json_array()));
	return spec_check_options(doc, (const char *const[]){ "retries", NULL });
}

static FALLIBLE enum err check_delete(const struct jval *doc, struct spec *s)
{
	struct jval target = jval_get(doc, "target");

	TRY(jval_only(doc, (const char *const[]){ "kind", "labels", "target", "options", NULL }));
	TRY(ref_read(&target, REF_CHECKPOINT, NULL, &s->target));
	return spec_check_options(doc, (const char *const[]){ "retries", NULL });
}

static FALLIBLE enum err read_kind(const struct jval *root, struct spec *s)
{
	struct jval v = jval_get(root, "kind");
	char hint[NEAR_HINT_MAX], list[256];
	bool listed_operation = false;
	struct str kind;
	size_t n = 0;

	TRY(jval_string(&v, &kind));
	if (kind_parse(kind, &s->kind))
		return OK;
	for (int k = 0; k < JOB_KIND_COUNT && n < sizeof list; k++) {
		bool operates = kind_is((enum job_kind)k, KIND_OPERATES), first = operates && !listed_operation;
		n += (size_t)snprintf(list + n, sizeof list - n, "%s%s%s", k ? ", " : "",
				      first ? "or an operation on state dicts: " : "", kind_names[k]);
		listed_operation |= operates;
	}
	return jval_fail(&v, ERR_UNKNOWN_KIND, "\"%.32s\" is no kind of job: %s%s", kind.p, list, near_hint(kind, kind_names, hint));
}

FALLIBLE enum err spec_check(json_t *doc, struct spec *out)
{
	static enum err (*const checks[JOB_KIND_COUNT])(const struct jval *, struct spec *) = {
		check_save, check_load, check_reshard, check_verify, check_diff, check_delete, spec_check_create, spec_check_copy,
		spec_check_offload, spec_check_gather, spec_check_broadcast, spec_check_distribute, spec_check_compare,
		spec_check_redistribute
	};
	struct jval root = JVAL_ROOT(doc), labels = jval_get(&root, "labels");
	struct spec s = { 0 };

	TRY(read_kind(&root, &s));
	TRY(checks[s.kind](&root, &s));
	TRY(spec_check_labels(&labels));
	TRY(spec_put_default(doc, "labels", json_object()));
	*out = s;
	return OK;
}
