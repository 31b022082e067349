/* chain_steps.c: see chain_steps.h. Requests are checked by spec_read, as those of callers: what a chain is refused for now would have
 * been refused then, with nobody there to read it. */
#include "server/chain_steps.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/near.h"
#include "server/runs.h"
#include "spec/fields.h"
#include "spec/spec.h"

enum { PATTERN_MAX = 1024, NAME_BYTES_MAX = 4096 };

static const struct step_word {
	const char *word, *kind;
	bool writes;                   /* a checkpoint elsewhere; else the step is about the chain's own */
} words[] = {
	{ "verify", "verify", false },
	{ "export", "reshard", true },
	{ "copy", "replicate", true },
	{ "delete", "delete", false },
};
enum { WORDS = sizeof words / sizeof *words };

static const struct step_word *word_of(const json_t *step)
{
	for (size_t i = 0; i < WORDS; i++)
		if (json_object_get(step, words[i].word))
			return &words[i];
	return NULL;
}

const char *chain_step_word(const json_t *step)
{
	const struct step_word *w = word_of(step);

	return w ? w->word : NULL;
}

/* ---- names ---- */

/* Appends `pattern`, in which {run} and the like stand for their values. The run "-" is that of names of one component, and is left out. */
static void expand(struct buf *b, const char *pattern, const char *storage, struct str run, const char *name, const char *step)
{
	const struct {
		const char *key;
		struct str value;
	} vars[] = { { "{run}", run }, { "{name}", str_of(name) }, { "{step}", str_of(step) }, { "{storage}", str_of(storage) } };

	for (const char *p = pattern; *p;) {
		size_t i = 0;
		while (i < 4 && strncmp(p, vars[i].key, strlen(vars[i].key)) != 0)
			i++;
		if (i == 4) {
			buf_putc(b, (unsigned char)*p++);
			continue;
		}
		p += strlen(vars[i].key);
		if (i == 0 && str_is(run, "-"))
			p += *p == '/';
		else
			buf_put(b, vars[i].value.p, vars[i].value.n);
	}
}

static FALLIBLE enum err expand_name(const char *pattern, const char *storage, const char *name, char **out)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(NAME_BYTES_MAX);
	const char *last = strrchr(name, '/');
	int64_t step = run_step(name, -1);
	char number[32] = "0";

	if (step >= 0)
		snprintf(number, sizeof number, "%jd", (intmax_t)step);
	expand(&b, pattern, storage, run_of(name), last ? last + 1 : name, number);
	TRY(buf_status(&b));
	*out = mem_strndup((char *)b.p, b.len);
	NEED(*out, "cannot name a checkpoint");
	return OK;
}

static const char *pattern_of(const json_t *fields)
{
	const char *name = json_string_value(json_object_get(fields, "name"));

	return name ? name : "{run}/{name}";
}

/* ---- requests ---- */

static const struct field *field_of(enum job_kind kind, const char *key)
{
	for (const struct field *f = field_next(kind, NULL); f; f = field_next(kind, f))
		if (strcmp(f->key, key) == 0 && (f->place == AT_ROOT || f->place == AT_TARGET || f->place == AT_OPTIONS))
			return f;
	return NULL;
}

/* Puts the step's fields where a request has them. */
static FALLIBLE enum err place_fields(const struct jval *fields, enum job_kind kind, bool writes, json_t *root, json_t *target,
				      json_t *options)
{
	char hint[NEAR_HINT_MAX];
	const char *key;
	json_t *value;

	json_object_foreach(fields->j, key, value) {
		struct jval v = jval_get(fields, key);
		const struct field *f = field_of(kind, key);
		bool is_place = writes && (strcmp(key, "storage") == 0 || strcmp(key, "name") == 0);
		if (is_place)
			continue;
		if (!f) {
			struct near near = near_begin(str_of(key));
			for (const struct field *g = field_next(kind, NULL); g; g = field_next(kind, g))
				near_try(&near, str_of(g->key));
			return jval_fail(&v, ERR_UNKNOWN_FIELD, "is not known to this step%s", near_text(&near, hint));
		}
		json_t *into = f->place == AT_TARGET ? target : f->place == AT_OPTIONS ? options : root;
		if (json_object_set_new(into, key, json_deep_copy(value)) != 0)
			return ERR(NO_MEMORY, "cannot make a request");
	}
	return OK;
}

/* {"storage","name"} of what a step writes. */
static FALLIBLE enum err read_target(const struct jval *fields, const char *storage, const char *name, json_t *target)
{
	struct jval to = jval_get(fields, "storage"), pattern = jval_get(fields, "name");
	CLEANUP(mem_free_ptr) char *made = NULL;
	struct str text;

	TRY(jval_string(&to, &text));
	TRY(jval_failed(&to, ref_check_storage(text)));
	if (pattern.j) {
		TRY(jval_string(&pattern, &text));
		if (text.n == 0 || text.n > PATTERN_MAX || strlen(text.p) != text.n)
			return jval_fail(&pattern, ERR_VALIDATION_FAILED, "must be a name of 1 to %d bytes, such as {run}/{name}-hf",
					 PATTERN_MAX);
	}
	TRY(expand_name(pattern_of(fields->j), storage, name, &made));
	TRY(jval_failed(pattern.j ? &pattern : fields, ref_check_name(str_of(made))));
	if (strcmp(json_string_value(to.j), storage) == 0 && strcmp(made, name) == 0)
		return jval_fail(pattern.j ? &pattern : &to, ERR_VALIDATION_FAILED, "is the checkpoint itself: give another name"
				 " or storage");
	if (json_object_set(target, "storage", to.j) != 0 || json_object_set_new(target, "name", json_string(made)) != 0)
		return ERR(NO_MEMORY, "cannot make a request");
	return OK;
}

static FALLIBLE enum err find_kind(const struct jval *step, const struct step_word **word_out, enum job_kind *kind_out)
{
	const struct step_word *w = json_object_size(step->j) == 1 ? word_of(step->j) : NULL;

	if (!w)
		return jval_fail(step, ERR_VALIDATION_FAILED,
				 "must be one of {\"verify\":{…}}, {\"export\":{…}}, {\"copy\":{…}} and {\"delete\":{…}}");
	if (!kind_parse(str_of(w->kind), kind_out))
		return jval_fail(step, ERR_UNSUPPORTED, "this dcpd has no jobs of kind \"%s\", which the step \"%s\" needs", w->kind,
				 w->word);
	*word_out = w;
	return OK;
}

/* A chain waits for nobody: its jobs leave the processors to training, unless the step says otherwise. */
static void set_pace(enum job_kind kind, json_t *options)
{
	if (field_of(kind, "pace") && !json_object_get(options, "pace"))
		json_object_set_new(options, "pace", json_string("background"));
}

FALLIBLE enum err chain_step_request(const struct jval *step, const char *chain, const char *storage, const char *name,
				     enum job_kind *kind_out, json_t **out)
{
	const struct step_word *w = words;

	TRY(find_kind(step, &w, kind_out));
	struct jval fields = jval_get(step, w->word);
	CLEANUP(jval_drop) json_t *root = json_pack("{s:s, s:{s:s}}", "kind", w->kind, "labels", "chain", chain);
	CLEANUP(jval_drop) json_t *target = json_object();
	CLEANUP(jval_drop) json_t *options = json_object();
	CLEANUP(jval_drop) json_t *own = json_pack("{s:s, s:s}", "storage", storage, "name", name);
	uint64_t failures = mem_failures();

	NEED(root && target && options && own, "cannot make a request");
	if (!json_is_object(fields.j))
		return jval_only(&fields, (const char *const[]){ NULL });
	TRY(place_fields(&fields, *kind_out, w->writes, root, target, options));
	if (w->writes)
		TRY(read_target(&fields, storage, name, target));
	set_pace(*kind_out, options);
	bool removes = kind_is(*kind_out, KIND_REMOVES);
	if (!removes)
		json_object_set(root, "source", own);
	if (removes)
		json_object_set(root, "target", own);
	else if (w->writes)
		json_object_set(root, "target", target);
	json_object_set(root, "options", options);
	if (mem_failures() != failures)
		return ERR(NO_MEMORY, "cannot make a request");
	*out = move(root);
	return OK;
}

/* ---- checking ---- */

/* The pointer of an error in a request becomes one into the step: "/target/format" is "/export/format". */
static enum err at_step(const struct jval *step, const char *word, enum err e)
{
	static const char *const places[] = { "/", "/target/", "/options/", "/source/" };
	struct err_info info = *err_last();
	struct jval fields = jval_get(step, word);
	char key[ERR_VALUE_MAX] = "";

	if (!e)
		return OK;
	for (size_t i = 0; i < sizeof places / sizeof *places; i++)
		if (str_starts(str_of(info.pointer), places[i]))
			snprintf(key, sizeof key, "%s", info.pointer + strlen(places[i]));
	key[strcspn(key, "/")] = '\0';
	struct jval v = jval_get(&fields, key);
	size_t said = strlen(info.pointer); /* "/target/format: …" */
	if (said && strncmp(info.text, info.pointer, said) == 0 && strncmp(info.text + said, ": ", 2) == 0)
		memmove(info.text, info.text + said + 2, strlen(info.text + said + 2) + 1);
	info.pointer[0] = '\0';
	err_restore(&info);
	return jval_failed(v.j ? &v : &fields, e);
}

static FALLIBLE enum err check_step(const struct jval *step, const char *storage, const char *name, enum job_kind *kind_out)
{
	CLEANUP(spec_free) struct spec spec = { 0 };
	CLEANUP(jval_drop) json_t *request = NULL;

	TRY(chain_step_request(step, "chain", storage, name, kind_out, &request));
	return at_step(step, chain_step_word(step->j), spec_read(request, &spec));
}

/* A name that the glob matches: each * is one letter. */
static FALLIBLE enum err sample(const char *match, char **out)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(NAME_BYTES_MAX);

	for (const char *p = match ? match : "*"; *p; p++)
		buf_putc(&b, *p == '*' ? 'x' : (unsigned char)*p);
	if (match && strcmp(match, "-") == 0)
		b.len = 0;
	buf_puts(&b, b.len ? "/step-100" : "step-100");
	TRY(buf_status(&b));
	*out = mem_strndup((char *)b.p, b.len);
	NEED(*out, "cannot check a chain");
	return OK;
}

/* Do two patterns name one checkpoint, whatever the chain's is called? Two names that have nothing in common tell. */
static FALLIBLE enum err name_the_same(const char *a, const char *b, const char *storage, struct str run, bool *out)
{
	static const char *const samples[][2] = { { "step-100", "100" }, { "q9z", "7" } };

	*out = true;
	for (size_t i = 0; i < sizeof samples / sizeof *samples && *out; i++) {
		CLEANUP(buf_free) struct buf x = BUF_INIT(NAME_BYTES_MAX);
		CLEANUP(buf_free) struct buf y = BUF_INIT(NAME_BYTES_MAX);
		expand(&x, a, storage, run, samples[i][0], samples[i][1]);
		expand(&y, b, storage, run, samples[i][0], samples[i][1]);
		TRY(buf_status(&x));
		TRY(buf_status(&y));
		*out = str_eq((struct str){ (char *)x.p, x.len }, (struct str){ (char *)y.p, y.len });
	}
	return OK;
}

/* The fields of a step that writes; NULL: it does not. */
static const json_t *written(const json_t *step)
{
	const struct step_word *w = word_of(step);

	return w && w->writes ? json_object_get(step, w->word) : NULL;
}

/* A step that writes where an earlier one has written fails when it runs, each time, unless it replaces that. */
static FALLIBLE enum err check_targets(const struct jval *steps, size_t at, const char *storage, const char *name)
{
	struct jval step = jval_at(steps, at);
	const json_t *own = written(step.j);

	for (size_t i = 0; i < at && own && !json_is_true(json_object_get(own, "overwrite")); i++) {
		const json_t *before = written(json_array_get(steps->j, i));
		bool same = false;
		if (before && json_equal(json_object_get(before, "storage"), json_object_get(own, "storage")))
			TRY(name_the_same(pattern_of(own), pattern_of(before), storage, run_of(name), &same));
		if (!same)
			continue;
		struct jval fields = jval_get(&step, chain_step_word(step.j)), pattern = jval_get(&fields, "name");
		return jval_fail(pattern.j ? &pattern : &fields, ERR_VALIDATION_FAILED,
				 "writes what step %zu has written: give another name or storage, or \"overwrite\": true", i);
	}
	return OK;
}

FALLIBLE enum err chain_steps_check(const struct jval *steps, const char *storage, const char *match)
{
	CLEANUP(mem_free_ptr) char *name = NULL;
	enum job_kind kind = JOB_VERIFY;
	size_t n = 0;

	TRY(jval_array(steps, CHAIN_STEPS_MAX, &n));
	if (n == 0)
		return jval_fail(steps, ERR_VALIDATION_FAILED, "has no step");
	TRY(sample(match, &name));
	for (size_t i = 0; i < n; i++) {
		struct jval step = jval_at(steps, i);
		TRY(check_step(&step, storage, name, &kind));
		TRY(check_targets(steps, i, storage, name));
		if (i + 1 < n && kind_is(kind, KIND_REMOVES))
			return jval_fail(&step, ERR_VALIDATION_FAILED, "must be the last step: after it there is no checkpoint");
	}
	return OK;
}

/* ---- loops ---- */

FALLIBLE enum err chain_step_makes(const json_t *step, const char *storage, const char *match, const char **storage_out, char **run_out)
{
	const struct step_word *w = word_of(step);
	CLEANUP(buf_free) struct buf b = BUF_INIT(NAME_BYTES_MAX);

	*run_out = NULL;
	if (!w || !w->writes)
		return OK;
	const json_t *fields = json_object_get(step, w->word);
	expand(&b, pattern_of(fields), storage, str_of(match ? match : "*"), "*", "*");
	buf_putc(&b, '\0');
	TRY(buf_status(&b));
	*storage_out = json_string_value(json_object_get(fields, "storage"));
	struct str run = run_of((char *)b.p); /* {name} is one component: its * matches no slash, which only makes this more careful */
	*run_out = mem_strndup(run.p, run.n);
	NEED(*run_out, "cannot check a chain");
	return OK;
}

/* The globs' last bytes first: meets[j] says whether a's rest and b's rest from j on meet. All chains may have to be
 * compared with each other, so that long globs are taken to meet. */
bool chain_steps_meet(const char *a, const char *b)
{
	enum { MAX = 256 };
	bool meets[MAX + 1] = { false };

	for (; *a && *b && *a != '*' && *b != '*'; a++, b++)
		if (*a != *b)
			return false;
	size_t n = strlen(a), m = strlen(b);
	if (m > MAX || n > MAX)
		return true;
	for (size_t i = n + 1; i-- > 0;) {
		bool below_right = false; /* of i + 1 and j + 1 */
		for (size_t j = m + 1; j-- > 0;) {
			bool below = i < n && meets[j], right = j < m && meets[j + 1], now;
			if (i == n && j == m)
				now = true;
			else
				now = (i < n && a[i] == '*' && (below || right)) || (j < m && b[j] == '*' && (below || right)) ||
				      (i < n && j < m && a[i] == b[j] && below_right);
			below_right = i < n && meets[j];
			meets[j] = now;
		}
	}
	return meets[0];
}
