/* ref.c: see ref.h. A name becomes a path below a storage root in a worker, so what could mean another place ("..", a leading
 * slash, a hidden file, an option of some tool) is refused here, before anything else sees it. */
#include "spec/ref.h"

FALLIBLE enum err ref_check_storage(struct str name)
{
	bool ok = name.n >= 1 && name.n <= REF_STORAGE_BYTES_MAX && name.p[0] >= 'a' && name.p[0] <= 'z';

	for (size_t i = 0; ok && i < name.n; i++) {
		char c = name.p[i];
		ok = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
	}
	if (!ok)
		return ERR(NAME_INVALID, "a storage's name matches [a-z][a-z0-9_-]{0,31}");
	if (str_is(name, "shm"))
		return ERR(NAME_INVALID, "\"shm\" stands for shared memory, no storage has that name");
	return OK;
}

static FALLIBLE enum err check_component(struct str c, const char *what)
{
	if (c.n == 0)
		return ERR(NAME_INVALID, "%s has an empty part (or begins or ends with '/')", what);
	if (c.n > REF_COMPONENT_BYTES_MAX)
		return ERR(NAME_INVALID, "%s has a part of %zu bytes, %d are allowed", what, c.n,
			   REF_COMPONENT_BYTES_MAX);
	if (c.p[0] == '.' || c.p[0] == '-')
		return ERR(NAME_INVALID, "%s has a part that begins with '%c'", what, c.p[0]);
	for (size_t i = 0; i < c.n; i++)
		if ((unsigned char)c.p[i] < 0x20 || c.p[i] == 0x7f)
			return ERR(NAME_INVALID, "%s has a control character", what);
	if (!str_utf8(c))
		return ERR(NAME_INVALID, "%s is not UTF-8", what);
	return OK;
}

FALLIBLE enum err ref_check_name(struct str name)
{
	size_t from = 0, parts = 0;

	if (name.n == 0)
		return ERR(NAME_INVALID, "the name is empty");
	for (size_t i = 0; i <= name.n; i++) {
		if (i < name.n && name.p[i] != '/')
			continue;
		if (++parts > REF_COMPONENTS_MAX)
			return ERR(NAME_INVALID, "the name has more than %d parts", REF_COMPONENTS_MAX);
		TRY(check_component((struct str){ name.p + from, i - from }, "the name"));
		from = i + 1;
	}
	return OK;
}

/* An alias is a part of references, on command lines too. */
static bool is_alias(struct str alias)
{
	bool good = alias.n >= 1 && alias.n <= REF_ALIAS_BYTES_MAX;

	for (size_t i = 0; good && i < alias.n; i++) {
		char c = alias.p[i], letter = (char)(c | 0x20);
		good = (letter >= 'a' && letter <= 'z') || (c >= '0' && c <= '9') || (i > 0 && (c == '-' || c == '_' || c == '.'));
	}
	return good;
}

FALLIBLE enum err ref_check_meant(struct str name)
{
	return str_starts(name, "-@") && is_alias((struct str){ name.p + 2, name.n - 2 }) ? OK : ref_check_name(name);
}

FALLIBLE enum err ref_check_alias(struct str alias)
{
	if (!is_alias(alias))
		return ERR(NAME_INVALID, "an alias matches [A-Za-z0-9][A-Za-z0-9._-]{0,63}");
	if (str_is(alias, "latest") || str_is(alias, "latest-verified"))
		return ERR(NAME_INVALID, "dcpd itself says which checkpoint is the %s", alias.p);
	return OK;
}

FALLIBLE enum err ref_check_state_dict(struct str name)
{
	TRY(check_component(name, "the state dict's name"));
	for (size_t i = 0; i < name.n; i++)
		if (name.p[i] == '/' || name.p[i] == ':')
			return ERR(NAME_INVALID, "the state dict's name has a '%c'", name.p[i]);
	return OK;
}

static FALLIBLE enum err check_node(struct str name)
{
	if (!is_alias(name)) /* has the same form */
		return ERR(NAME_INVALID, "a node's name matches [A-Za-z0-9][A-Za-z0-9._-]{0,63}");
	return OK;
}

/* The keys that the object may have. */
static void put_keys(unsigned kinds, bool remote, const char *const *more, const char *keys[16])
{
	size_t n = 0;

	if (kinds & REF_CHECKPOINT) {
		keys[n++] = "storage";
		keys[n++] = "name";
	}
	if ((kinds & REF_STATE_DICT) || remote)
		keys[n++] = "state_dict";
	if (remote) {
		keys[n++] = "node";
		keys[n++] = "generation";
	}
	for (size_t i = 0; more && more[i]; i++) {
		must(n < 15);
		keys[n++] = more[i];
	}
	keys[n] = NULL;
}

static FALLIBLE enum err read_state_dict(const struct jval *v, struct ref *out)
{
	struct jval state_dict = jval_get(v, "state_dict"), node = jval_get(v, "node"), generation = jval_get(v, "generation");

	out->kind = node.j ? REF_REMOTE : REF_STATE_DICT;
	TRY(jval_string(&state_dict, &out->name));
	TRY(jval_failed(&state_dict, ref_check_state_dict(out->name)));
	if (!node.j)
		return OK;
	TRY(jval_string(&node, &out->node));
	TRY(jval_failed(&node, check_node(out->node)));
	return generation.j ? jval_integer(&generation, 0, INT64_MAX, &out->generation) : OK;
}

FALLIBLE enum err ref_read(const struct jval *v, unsigned kinds, const char *const *more, struct ref *out)
{
	const char *keys[16];
	struct jval state_dict = jval_get(v, "state_dict"), storage = jval_get(v, "storage"), name = jval_get(v, "name");
	bool remote = (kinds & REF_REMOTE) && jval_get(v, "node").j;
	struct ref ref = { .generation = -1 };

	put_keys(kinds, remote, more, keys);
	TRY(jval_only(v, keys));
	if (state_dict.j && (storage.j || name.j))
		return jval_fail(v, ERR_VALIDATION_FAILED, "names a checkpoint and a state dict at once");
	if (state_dict.j || remote || kinds == REF_STATE_DICT) {
		TRY(read_state_dict(v, &ref));
	} else {
		ref.kind = REF_CHECKPOINT;
		TRY(jval_string(&storage, &ref.storage));
		TRY(jval_failed(&storage, ref_check_storage(ref.storage)));
		TRY(jval_string(&name, &ref.name));
		TRY(jval_failed(&name, ref_check_meant(ref.name)));
	}
	*out = ref;
	return OK;
}

json_t *ref_doc(const struct ref *ref)
{
	if (ref->kind == REF_REMOTE)
		return json_pack("{s:s, s:s, s:I}", "state_dict", ref->name.p, "node", ref->node.p, "generation",
				 (json_int_t)ref->generation);
	if (ref->kind == REF_STATE_DICT)
		return json_pack("{s:s}", "state_dict", ref->name.p);
	return json_pack("{s:s, s:s}", "storage", ref->storage.p, "name", ref->name.p);
}

FALLIBLE enum err ref_parse(struct str text, struct ref *out)
{
	const char *colon = text.n ? memchr(text.p, ':', text.n) : NULL;
	struct ref ref = { .kind = REF_CHECKPOINT, .generation = -1 };

	if (!colon)
		return ERR(NAME_INVALID, "a reference has the form STORAGE:NAME");
	ref.storage = (struct str){ text.p, (size_t)(colon - text.p) };
	ref.name = (struct str){ colon + 1, text.n - ref.storage.n - 1 };
	if (str_is(ref.storage, "shm")) {
		ref.kind = REF_STATE_DICT;
		TRY(ref_check_state_dict(ref.name));
	} else {
		TRY(ref_check_storage(ref.storage));
		TRY(ref_check_meant(ref.name));
	}
	*out = ref;
	return OK;
}

struct str ref_run(const char *name)
{
	const char *slash = strrchr(name, '/');

	return slash ? (struct str){ name, (size_t)(slash - name) } : STR("-");
}

/* Bytes of the name in front of the end that tells the format of a checkpoint of one file. Names of GGUF files end in the kind of their
 * blocks (Q8_0), which is no step. */
static size_t before_ending(const char *name)
{
	static const char *const ends[] = { ".pt", ".pth", ".bin", ".npz", ".safetensors" };
	struct str s = str_of(name);

	for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
		if (str_ends(s, ends[i]))
			return s.n - strlen(ends[i]);
	return s.n;
}

int64_t ref_step(const char *name, int64_t generation)
{
	size_t end = before_ending(name), at = end;
	uint64_t step;

	while (at > 0 && name[at - 1] >= '0' && name[at - 1] <= '9')
		at--;
	if (str_to_u64((struct str){ name + at, end - at }, &step) && step <= INT64_MAX)
		return (int64_t)step;
	return generation;
}
