/* spec.c: see spec.h. fields.def says what each field must be; here is what fields ask of each other. */
#include "spec/spec.h"

#include <stdio.h>

#include "base/jtext.h"
#include "base/near.h"
#include "spec/job_id.h"

enum { SPEC_BYTES_MAX = 64 << 20, PARTS_MAX = 4096, HOSTS_MAX = 1024, HOSTS_TIMEOUT_S = 20, AWAIT_S = 600,
       CHECKPOINT_TEXT_MAX = 4096 };

/* A planned save: the state dict is a list of items, the parts hold their bytes (worker/ops/planned_save.h). */
static FALLIBLE enum err read_parts(const struct jval *source, struct spec *s)
{
	struct jval parts = jval_get(source, "parts");
	size_t n = 0;

	if (!parts.j)
		return OK;
	TRY(jval_array(&parts, PARTS_MAX, &n));
	TRY(arena_alloc(s->arena, n, sizeof *s->parts.v, &s->parts.v));
	for (s->parts.n = 0; s->parts.n < n; s->parts.n++) {
		struct jval part = jval_at(&parts, s->parts.n), generation = jval_get(&part, "generation");
		struct ref *ref = &s->parts.v[s->parts.n];
		TRY(ref_read(&part, REF_STATE_DICT, (const char *const[]){ "generation", NULL }, ref));
		TRY(jval_integer(&generation, 0, INT64_MAX, &ref->generation));
	}
	return OK;
}

static FALLIBLE enum err check_hosts_id(const struct jval *v, struct str id)
{
	if (id.n < 8 || id.n > 64 || strspn(id.p, "abcdefghijklmnopqrstuvwxyz0123456789-") != id.n)
		return jval_fail(v, ERR_VALIDATION_FAILED, "has 8 to 64 of a-z, 0-9 and -");
	return OK;
}

static FALLIBLE enum err read_hosts(const struct jval *doc, struct arena *a, struct spec_hosts *out)
{
	struct jval h = jval_get(doc, "hosts"), id = jval_get(&h, "id"), ranks = jval_get(&h, "ranks"), index = jval_get(&h, "index");
	int64_t number = 0;

	if (!h.j)
		return OK;
	TRY(jval_only(&h, (const char *const[]){ "id", "part", "index", "names", "ranks", "timeout_s", NULL }));
	TRY(jval_string(&id, &out->id));
	TRY(check_hosts_id(&id, out->id));
	TRY(jval_opt_bool(&h, "part", &out->part));
	if (out->part && !json_object_get(json_object_get(doc->j, "source"), "parts"))
		return jval_fail(&h, ERR_VALIDATION_FAILED, "a part is of a planned save, which has source.parts");
	if (out->part)
		return jval_only(&h, (const char *const[]){ "id", "part", NULL });
	TRY(jval_array(&ranks, HOSTS_MAX, &out->count));
	if (out->count < 2)
		return jval_fail(&ranks, ERR_VALIDATION_FAILED, "needs the ranks of 2 hosts or more");
	TRY(arena_alloc(a, out->count, sizeof *out->ranks, &out->ranks));
	for (size_t i = 0; i < out->count; i++) {
		struct jval one = jval_at(&ranks, i);
		TRY(field_read_ranks(&one, a, &out->ranks[i]));
	}
	TRY(jval_opt_texts(&h, "names", out->count, 256, a, &out->names));
	TRY(jval_integer(&index, 0, (int64_t)out->count - 1, &number));
	out->index = (uint32_t)number;
	out->timeout_s = HOSTS_TIMEOUT_S;
	TRY(jval_opt_integer(&h, "timeout_s", 1, 3600, &out->timeout_s));
	return field_put_default(h.j, "timeout_s", json_integer(out->timeout_s));
}

/* dcpd knows the word of a format that it only reads: more helpful than "is no format". */
static FALLIBLE enum err check_format_written(const struct jval *target)
{
	static const char *const read_only[] = {
#define X(NAME, word, ...) word,
#define TARGET(...)
#include "format/formats.def"
	};
	static const char written[] = ""
#define X(...)
#define TARGET(NAME, word, ...) ", " word
#include "format/formats.def"
		;
	struct jval format = jval_get(target, "format");

	for (size_t i = 0; json_is_string(format.j) && i < sizeof read_only / sizeof *read_only; i++)
		if (strcmp(json_string_value(format.j), read_only[i]) == 0)
			return jval_fail(&format, ERR_FORMAT_UNSUPPORTED, "checkpoints cannot be written as \"%s\", only as: %s",
					 read_only[i], written + 2);
	return OK;
}

/* A save writes what trainers write; other formats are made of that by a reshard. */
FALLIBLE enum err spec_check_save_format(const struct jval *target)
{
	struct jval format = jval_get(target, "format");
	struct spec s = { 0 };

	TRY(check_format_written(target));
	TRY(field_read(JOB_SAVE, AT_TARGET, target, &s));
	if (s.format != TARGET_DCP)
		return jval_fail(&format, ERR_VALIDATION_FAILED, "a save writes \"dcp\"; reshard what it wrote to another format");
	return OK;
}

/* "beside" is what in_place was called before. */
static FALLIBLE enum err take_older_name(const struct jval *options)
{
	struct jval old = jval_get(options, "beside"), now = jval_get(options, "in_place");

	if (!old.j)
		return OK;
	if (now.j && !json_equal(old.j, now.j))
		return jval_fail(&old, ERR_VALIDATION_FAILED, "is the older name of in_place, which says otherwise");
	return field_put_default(options->j, "in_place", json_incref(old.j));
}

static FALLIBLE enum err read_options(enum job_kind kind, const struct jval *doc, struct spec *s)
{
	const char *keys[FIELD_KEYS_MAX];

	TRY(field_put_default(doc->j, "options", json_object()));
	struct jval options = jval_get(doc, "options");
	field_keys(kind, AT_OPTIONS, NULL, keys);
	TRY(jval_only(&options, keys));
	TRY(take_older_name(&options));
	return field_read(kind, AT_OPTIONS, &options, s);
}

/* {"hold","alias"} of the options of `doc`. */
static FALLIBLE enum err check_alias(const struct jval *doc, const struct spec *s)
{
	struct jval options = jval_get(doc, "options"), alias = jval_get(&options, "alias");

	return s->alias.p ? jval_failed(&alias, ref_check_alias(s->alias)) : OK;
}

static FALLIBLE enum err check_wish(const struct jval *save, struct spec *s)
{
	struct jval labels = jval_get(save, "labels"), metrics = jval_get(save, "metrics"), name = jval_get(save, "name");

	TRY(ref_read(save, REF_CHECKPOINT, (const char *const[]){ "format", "options", "labels", "metrics", "hosts", NULL }, &s->target));
	TRY(jval_failed(&name, ref_check_name(s->target.name)));
	TRY(read_hosts(save, s->arena, &s->hosts));
	TRY(spec_check_save_format(save));
	TRY(field_read_labels(&labels, s->arena, &s->labels));
	TRY(field_read_metrics(&metrics, s->arena, &s->metrics));
	TRY(read_options(JOB_SAVE, save, s));
	return check_alias(save, s);
}

FALLIBLE enum err spec_check_save_wish(const struct jval *save)
{
	CLEANUP(spec_free) struct spec s = { .arena = arena_new(SPEC_BYTES_MAX) };

	return s.arena ? check_wish(save, &s) : ERR(NO_MEMORY, "no memory to read a request");
}

/* {"await_seal": true}: the job is made before its generation is sealed, and waits for that. */
static FALLIBLE enum err check_await_seal(const struct jval *source, struct spec *s)
{
	struct jval wish = jval_get(source, "await_seal"), generation = jval_get(source, "generation");
	struct jval timeout = jval_get(source, "timeout_s");

	if (!s->await_seal && timeout.j)
		return jval_fail(&timeout, ERR_VALIDATION_FAILED, "is how long await_seal waits");
	if (!s->await_seal)
		return OK;
	TRY(jval_integer(&generation, 0, INT64_MAX, &s->source.generation));
	if (jval_get(source, "parts").j && (!s->hosts.part || json_array_size(jval_get(source, "parts").j) != 1))
		return jval_fail(&wish, ERR_VALIDATION_FAILED, "a planned save is of what is sealed already, but for a rank's part of one");
	if (s->hosts.id.p && !s->hosts.part)
		return jval_fail(&wish, ERR_VALIDATION_FAILED, "a save by several hosts is of what is sealed already");
	s->await_timeout_s = s->await_timeout_s ? s->await_timeout_s : AWAIT_S;
	return field_put_default(source->j, "timeout_s", json_integer(s->await_timeout_s));
}

/* {"incremental","parent"}: are bytes shared, and with which checkpoint? */
static FALLIBLE enum err check_parent(const struct jval *doc, struct spec *s)
{
	struct jval options = jval_get(doc, "options"), parent = jval_get(&options, "parent"), wish = jval_get(&options, "incremental");

	s->may_share = s->incremental || !wish.j;
	if (!s->parent.kind)
		return OK;
	if (!s->may_share)
		return jval_fail(&parent, ERR_VALIDATION_FAILED, "a save that is not incremental has no parent");
	if (!str_eq(s->parent.storage, s->target.storage))
		return jval_fail(&parent, ERR_VALIDATION_FAILED, "lies in another storage than the target: nothing can be shared with it");
	return OK;
}

static FALLIBLE enum err check_save(const struct jval *doc, struct spec *s)
{
	struct jval source = jval_get(doc, "source"), target = jval_get(doc, "target");

	TRY(read_hosts(doc, s->arena, &s->hosts));
	TRY(check_await_seal(&source, s));
	TRY(read_parts(&source, s));
	TRY(check_parent(doc, s));
	TRY(check_alias(doc, s));
	return spec_check_save_format(&target);
}

static FALLIBLE enum err read_replica(const struct jval *doc, struct spec *s)
{
	struct jval v = jval_get(doc, "replica"), job = jval_get(&v, "job"), of = jval_get(&v, "checkpoint"), hosts = jval_get(&v, "hosts");

	if (s->kind != JOB_LOAD || !v.j)
		return OK;
	TRY(jval_only(&v, (const char *const[]){ "job", "checkpoint", "part", "hosts", NULL }));
	TRY(jval_string(&job, &s->replica.job));
	TRY(jval_opt_bool(&v, "part", &s->replica.is_part));
	if (hosts.j) {
		TRY(jval_string(&hosts, &s->replica.hosts));
		TRY(check_hosts_id(&hosts, s->replica.hosts));
	}
	if (!job_id_ok(s->replica.job))
		return jval_fail(&job, ERR_VALIDATION_FAILED, "is no job's id");
	TRY(ref_read(&of, REF_CHECKPOINT, NULL, &s->replica.of));
	return s->source.kind == REF_REMOTE ? OK : jval_fail(&v, ERR_VALIDATION_FAILED, "is of a load out of another node's memory");
}

/* The layout's rules, and the world that they or the request ask for. */
static FALLIBLE enum err check_cut(const struct jval *doc, struct spec *s)
{
	struct jval target = jval_get(doc, "target"), layout = jval_get(kind_is(s->kind, KIND_OPERATES) ? doc : &target, "layout");

	TRY(layout_rules_check(&layout, &s->layout, kind_is(s->kind, KIND_OPERATES), &s->world_size));
	return s->world_size > 0 ? field_put_default(target.j, "world_size", json_integer(s->world_size)) : OK;
}

static FALLIBLE enum err read_transform(const struct jval *doc, struct spec *s)
{
	struct jval transform = jval_get(doc, "transform"), vars = jval_get(doc, "vars");

	if (vars.j && !transform.j)
		return jval_fail(&vars, ERR_VALIDATION_FAILED, "is for the rules of transform, and there are none");
	return conversion_read(&transform, &vars, s->arena, &s->transform);
}

/* The model says how the optimizer's tensors are cut, so that a layout would contradict it. */
static FALLIBLE enum err read_optimizer(const struct jval *doc, struct spec *s)
{
	struct jval o = jval_get(doc, "optimizer"), target = jval_get(doc, "target"), layout = jval_get(&target, "layout");
	const char *keys[FIELD_KEYS_MAX];

	if (!o.j)
		return OK;
	field_keys(s->kind, AT_OPTIMIZER, NULL, keys);
	TRY(jval_only(&o, keys));
	TRY(field_read(s->kind, AT_OPTIMIZER, &o, s));
	if (s->layout.n)
		return jval_fail(&layout, ERR_VALIDATION_FAILED, "the layout of optimizer state follows from its model");
	return OK;
}

static FALLIBLE enum err read_spread(const struct jval *doc, struct spec *s)
{
	struct jval v = jval_get(doc, "spread"), nodes = jval_get(&v, "nodes"), id = jval_get(&v, "id");
	const char *keys[FIELD_KEYS_MAX];

	if (!v.j)
		return OK;
	field_keys(s->kind, AT_SPREAD, NULL, keys);
	TRY(jval_only(&v, keys));
	TRY(field_read(s->kind, AT_SPREAD, &v, s));
	if (s->source.kind != REF_CHECKPOINT)
		return jval_fail(&v, ERR_VALIDATION_FAILED, "is for what is read from a storage: the source is no checkpoint");
	if (s->spread_nodes.n < 2 || s->spread_nodes.n > SPEC_SPREAD_MAX)
		return jval_fail(&nodes, ERR_VALIDATION_FAILED, "names 2 to %d nodes", SPEC_SPREAD_MAX);
	for (size_t i = 0; i < s->spread_nodes.n; i++)
		if (!s->spread_nodes.v[i].n || s->spread_nodes.v[i].n > 64)
			return jval_fail(&nodes, ERR_VALIDATION_FAILED, "a node's name has 1 to 64 bytes");
	if (!id.j)
		return OK;
	TRY(jval_string(&id, &s->spread_id));
	return s->spread_id.n && s->spread_id.n <= 64 ? OK : jval_fail(&id, ERR_VALIDATION_FAILED, "has 1 to 64 bytes");
}

/* The first one is the job's source: its tensors are what the others must have, too. */
static FALLIBLE enum err check_merge(const struct jval *doc, struct spec *s)
{
	struct jval sources = jval_get(doc, "sources"), weights = jval_get(doc, "weights");

	if (s->kind != JOB_MERGE)
		return OK;
	if (s->sources.n < 2)
		return jval_fail(&sources, ERR_VALIDATION_FAILED, "a merge is of 2 to %d checkpoints", SPEC_SOURCES_MAX);
	if (s->weights.n && s->weights.n != s->sources.n)
		return jval_fail(&weights, ERR_VALIDATION_FAILED, "%zu weights for %zu checkpoints", s->weights.n, s->sources.n);
	s->source = s->sources.v[0];
	for (size_t i = 0; i < s->sources.n; i++) {
		struct jval source = jval_at(&sources, i);
		if (str_eq(s->sources.v[i].storage, s->target.storage) && str_eq(s->sources.v[i].name, s->target.name))
			return jval_fail(&source, ERR_VALIDATION_FAILED, "is the target");
	}
	return OK;
}

/* Ranks that are counted within the group, as far as the request says how large the group is. */
static FALLIBLE enum err check_members(const struct jval *doc, const struct spec *s)
{
	struct jval only = jval_get(doc, "ranks_only"), root = jval_get(doc, "root");
	int64_t last = (int64_t)s->group.n - 1, rank = 0;

	for (size_t i = 0; s->group.n && i < s->ranks_only.n; i++) {
		struct jval v = jval_at(&only, i);
		TRY(jval_integer(&v, 0, last, &rank));
	}
	return s->group.n && root.j ? jval_integer(&root, 0, last, &rank) : OK;
}

static FALLIBLE enum err check_tolerances(const struct jval *doc, const struct spec *s)
{
	struct jval rtol = jval_get(doc, "rtol"), atol = jval_get(doc, "atol");

	if (s->kind == JOB_COMPARE && !s->values && (s->rtol > 0 || s->atol > 0))
		return jval_fail(s->rtol > 0 ? &rtol : &atol, ERR_VALIDATION_FAILED, "is for values: give \"values\":true, too");
	return OK;
}

/* How the names of checkpoints end that are one file; `must`: the format has no other form. */
static const struct {
	const char *ends;
	bool must;
} one_file[] = {
#define X(...)
#define MUST_FORMAT_OTHER true
#define MUST_FORMAT_PAYLOAD false
#define MUST_FORMAT_METADATA false
#define TARGET(NAME, word, file, mark, ends, ...) [TARGET_##NAME] = { ends, MUST_##mark },
#define FILE_TARGET(NAME, word, file, mark, ends, ...) [TARGET_##NAME] = { ends, true },
#include "format/formats.def"
};

/* Kinds that make checkpoints of stored ones, in any format. */
static bool converts(const struct spec *s)
{
	return s->kind == JOB_RESHARD || s->kind == JOB_MERGE || s->kind == JOB_APPLY;
}

bool spec_target_is_file(const struct spec *s)
{
	bool ends = false;

	for (const char *p = one_file[s->format].ends; converts(s) && *p && !ends;) {
		size_t n = strcspn(p, " ");
		struct str name = s->target.name;
		ends = name.n > n && memcmp(name.p + name.n - n, p, n) == 0;
		p += n + strspn(p + n, " ");
	}
	return ends;
}

/* A format that makes one file says so by the target's name, so that the checkpoint is recognised by it. */
static FALLIBLE enum err check_ending(const struct jval *doc, const struct spec *s)
{
	struct jval target = jval_get(doc, "target"), name = jval_get(&target, "name");

	if (!converts(s) || spec_target_is_file(s) || !one_file[s->format].must)
		return OK;
	return jval_fail(&name, ERR_NAME_INVALID, "the format \"%s\" makes one file: its name ends in %s", field_word(s, &s->format),
			 one_file[s->format].ends);
}

static FALLIBLE enum err check_assets(const struct jval *doc, const struct spec *s)
{
	struct jval target = jval_get(doc, "target"), copy = jval_get(&target, "copy_assets");

	if (!s->copy_assets || !spec_target_is_file(s))
		return OK;
	return jval_fail(&copy, ERR_VALIDATION_FAILED, "the target is one file, and other files have no place in it");
}

static FALLIBLE enum err check_blocks(const struct jval *doc, const struct spec *s)
{
	struct jval list = jval_get(doc, "dtype");

	for (size_t i = 0; s->format != TARGET_GGUF && i < s->dtype.n; i++) {
		struct jval pair = jval_at(&list, i), word = jval_at(&pair, 1);
		if (s->dtype.v[i].q8_0)
			return jval_fail(&word, ERR_VALIDATION_FAILED, "only a target in GGUF has tensors of " SPEC_Q8_0);
	}
	return OK;
}

static FALLIBLE enum err check_from(const struct jval *doc, const struct spec *s)
{
	struct jval from = jval_get(doc, "from");

	if (!s->from.kind || !ref_same(&s->from, &s->target))
		return OK;
	return jval_fail(&from, ERR_VALIDATION_FAILED, "is the checkpoint that is repaired: name another one, or none");
}

static FALLIBLE enum err check_target(const struct jval *doc, const struct spec *s)
{
	struct jval target = jval_get(doc, "target");
	bool needs_other = kind_is(s->kind, KIND_MAKES | KIND_TARGET_THERE);

	if (needs_other && ref_same(&s->source, &s->target))
		return jval_fail(&target, ERR_VALIDATION_FAILED, "is the source itself");
	if (s->base.kind && ref_same(&s->base, &s->target))
		return jval_fail(&target, ERR_VALIDATION_FAILED, "is the base itself");
	return check_format_written(&target);
}

/* {"only_if": {"etag", "present", "unaliased"}} of a delete. */
static FALLIBLE enum err read_only_if(const struct jval *doc, struct spec *s)
{
	struct jval options = jval_get(doc, "options"), v = jval_get(&options, "only_if"), etag = jval_get(&v, "etag");
	struct jval present = jval_get(&v, "present");

	if (s->kind != JOB_DELETE || !v.j)
		return OK;
	TRY(jval_only(&v, (const char *const[]){ "etag", "present", "unaliased", NULL }));
	if (etag.j)
		TRY(jval_string(&etag, &s->only_if.etag));
	TRY(jval_opt_texts(&v, "present", SPEC_SOURCES_MAX, CHECKPOINT_TEXT_MAX, s->arena, &s->only_if.present));
	for (size_t i = 0; i < s->only_if.present.n; i++)
		TRY(jval_failed(&present, ref_check_name(s->only_if.present.v[i])));
	TRY(jval_opt_bool(&v, "unaliased", &s->only_if.unaliased));
	s->only_if.is_given = true;
	return OK;
}

/* A delta is applied to files or to shared memory: fields of the one say nothing of the other. */
static FALLIBLE enum err check_apply(const struct jval *doc, const struct spec *s)
{
	bool memory = s->target.kind == REF_STATE_DICT;
	const struct {
		bool given;
		enum field_place place;
		const char *key;
	} wrong[] = { { memory && s->format != TARGET_DCP, AT_TARGET, "format" },
		      { memory && s->max_file_bytes, AT_TARGET, "max_file_bytes" },
		      { memory && s->overwrite, AT_OPTIONS, "overwrite" },
		      { memory && s->files_per_rank != 1, AT_OPTIONS, "files_per_rank" },
		      { !memory && s->lease_seconds, AT_TARGET, "lease_seconds" } };

	for (size_t i = 0; s->kind == JOB_APPLY && i < sizeof wrong / sizeof *wrong; i++) {
		struct jval at = jval_get(doc, field_place_key(wrong[i].place)), v = jval_get(&at, wrong[i].key);
		if (wrong[i].given)
			return jval_fail(&v, ERR_VALIDATION_FAILED, "is of targets that are %s", memory ? "checkpoints" : "state dicts");
	}
	return OK;
}

bool spec_has_rules(const struct spec *s)
{
	return s->include.n || s->exclude.n || s->rename.n || s->dtype.n;
}

/* A load with `delta` knows by the digests of another node's images what has changed. A redistribute selects as a load does, into segments
 * that are cut as if they were new; a load has no group, and its segments are no GPU's. */
static FALLIBLE enum err check_delta(const struct jval *doc, const struct spec *s)
{
	struct jval v = jval_get(doc, "delta"), group = jval_get(doc, "group"), device = jval_get(doc, "device");
	bool selects = s->kind == JOB_REDISTRIBUTE && spec_has_rules(s);

	if (selects && !s->delta)
		return jval_fail(doc, ERR_VALIDATION_FAILED, "include, exclude, rename and dtype of a redistribute go with \"delta\":true");
	if (selects && (s->group.n || s->device != RESULT_CPU))
		return jval_fail(s->group.n ? &group : &device, ERR_VALIDATION_FAILED,
				 "goes with none of include, exclude, rename and dtype");
	if (s->kind != JOB_LOAD || !s->delta)
		return OK;
	if (s->source.kind != REF_REMOTE)
		return jval_fail(&v, ERR_VALIDATION_FAILED, "is for a source in the memory of another node: the source names no node");
	if (s->optimizer_key.n || s->transform.count)
		return jval_fail(&v, ERR_VALIDATION_FAILED, "goes neither with an optimizer nor with rules of conversion");
	return OK;
}

static FALLIBLE enum err read_ref(const struct jval *doc, enum field_place place, unsigned kinds, struct ref *out, struct spec *s)
{
	struct jval v = jval_get(doc, field_place_key(place)), name = jval_get(&v, "name");
	bool is_made = place == AT_TARGET && !kind_is(s->kind, KIND_REMOVES | KIND_REPAIRS);
	const char *keys[FIELD_KEYS_MAX];

	if (!kinds)
		return OK;
	field_keys(s->kind, place, NULL, keys);
	TRY(ref_read(&v, kinds, keys, out));
	return is_made && out->kind == REF_CHECKPOINT ? jval_failed(&name, ref_check_name(out->name)) : OK;
}

static FALLIBLE enum err read_places(const struct jval *doc, struct spec *s)
{
	for (enum field_place place = AT_SOURCE; place <= AT_BASE; place++) {
		struct jval at = jval_get(doc, field_place_key(place));
		if (at.j)
			TRY(field_read(s->kind, place, &at, s));
	}
	TRY(field_read(s->kind, AT_ROOT, doc, s));
	TRY(read_optimizer(doc, s));
	TRY(read_spread(doc, s));
	return read_options(s->kind, doc, s);
}

static FALLIBLE enum err check_root(const struct jval *doc, const struct spec *s)
{
	const struct kind *kind = kind_of(s->kind);
	const char *first[9] = { "kind", "labels" }, *keys[FIELD_KEYS_MAX];
	size_t n = 2;

	if (kind->reads)
		first[n++] = kind_is(s->kind, KIND_COMPARES) ? "a" : "source";
	if (kind_is(s->kind, KIND_COMPARES))
		first[n++] = "b";
	if (kind_is(s->kind, KIND_HAS_BASE))
		first[n++] = field_place_key(AT_BASE);
	if (kind->writes)
		first[n++] = "target";
	first[n++] = "options";
	if (s->kind == JOB_LOAD) {
		first[n++] = field_place_key(AT_OPTIMIZER);
		first[n++] = field_place_key(AT_SPREAD);
	}
	field_keys(s->kind, AT_ROOT, first, keys);
	return jval_only(doc, keys);
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

static FALLIBLE enum err read_all(const struct jval *root, struct spec *s)
{
	field_fallbacks(s);
	TRY(read_kind(root, s));
	unsigned reads = kind_of(s->kind)->reads, compares = kind_is(s->kind, KIND_COMPARES) ? reads : 0;
	TRY(check_root(root, s));
	TRY(read_ref(root, AT_SOURCE, reads & ~compares, &s->source, s));
	TRY(read_ref(root, AT_TARGET, kind_of(s->kind)->writes, &s->target, s));
	TRY(read_ref(root, AT_BASE, kind_is(s->kind, KIND_HAS_BASE) ? REF_CHECKPOINT | REF_STATE_DICT : 0, &s->base, s));
	TRY(read_ref(root, AT_A, compares, &s->a, s));
	TRY(read_ref(root, AT_B, compares, &s->b, s));
	TRY(check_target(root, s));
	TRY(read_places(root, s));
	if (s->kind == JOB_SAVE)
		TRY(check_save(root, s));
	TRY(read_only_if(root, s));
	TRY(read_replica(root, s));
	TRY(check_apply(root, s));
	TRY(check_ending(root, s));
	TRY(check_assets(root, s));
	TRY(check_from(root, s));
	TRY(check_blocks(root, s));
	TRY(check_cut(root, s));
	TRY(read_transform(root, s));
	TRY(check_delta(root, s));
	TRY(check_merge(root, s));
	TRY(check_members(root, s));
	return check_tolerances(root, s);
}

FALLIBLE enum err spec_read(json_t *doc, struct spec *out)
{
	struct jval root = JVAL_ROOT(doc);
	CLEANUP(spec_free) struct spec s = { .arena = arena_new(SPEC_BYTES_MAX) };

	NEED(s.arena, "no memory to read a request");
	TRY(read_all(&root, &s));
	spec_free(out);
	*out = s;
	s.arena = NULL;
	return OK;
}

char *spec_wishes(const json_t *doc)
{
	static const char *const others[] = { "source", "base", "target", "a", "b", "hosts", "labels", "metrics" };
	CLEANUP(jval_drop) json_t *rest = json_copy((json_t *)(uintptr_t)doc);

	for (size_t i = 0; rest && i < sizeof others / sizeof *others; i++)
		(void)json_object_del(rest, others[i]);
	json_t *options = json_copy(json_object_get(rest, "options"));
	(void)json_object_del(options, "parent");
	if (options && json_object_set_new(rest, "options", options) != 0)
		return NULL;
	return rest ? jtext_of(rest) : NULL;
}

void spec_free(struct spec *s)
{
	arena_free(s->arena);
	*s = (struct spec){ 0 };
}
