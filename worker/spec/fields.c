/* fields.c: see fields.h. A field that a kind does not use is unknown to it: a caller who writes "layout" in a save would otherwise
 * believe that it was obeyed. */
#include "spec/fields.h"

#include <math.h>
#include <stdlib.h>

#include "base/jtext.h"
#include "base/near.h"
#include "spec/spec.h"

enum { LABELS_MAX = 32, LABEL_KEY_MAX = 64, LABEL_VALUE_MAX = 256, METRICS_MAX = 64, METRIC_NAME_MAX = 64 };

#define WORD(NAME, word) #word,
#define WORDS(name, ...) static const char *const name##_words[] = { __VA_ARGS__ NULL };
#include "spec/fields.def"
#undef WORD

static const char *const target_format_words[] = {
#define X(...)
#define TARGET(NAME, word, ...) word,
#include "format/formats.def"
	NULL,
};

#define K(NAME) (1u << JOB_##NAME)
#define EVERY ((1u << JOB_KIND_COUNT) - 1)
#define CONVERTING (K(RESHARD) | K(MERGE) | K(APPLY))
#define MAKING (K(SAVE) | CONVERTING)
#define BASED (K(DELTA) | K(APPLY))
#define CHANGING (K(SAVE) | K(RESHARD) | K(LOAD))
#define PACED (CHANGING | K(MERGE) | BASED | K(VERIFY) | K(STATS) | K(REPLICATE))
#define PICKING (CHANGING | K(MERGE) | K(VERIFY) | K(DIFF))
#define COMPARING (K(DIFF) | K(COMPARE))
#define MOVING (K(CREATE) | K(COPY) | K(OFFLOAD) | K(GATHER) | K(BROADCAST) | K(DISTRIBUTE) | K(REDISTRIBUTE))
#define OPERATIONS (MOVING | K(COMPARE))
#define CUTTING (K(LOAD) | CONVERTING | K(BROADCAST) | K(DISTRIBUTE) | K(REDISTRIBUTE))

#define BOOL .type = FIELD_BOOL
#define INTEGER(from, to) .type = FIELD_INTEGER, .min = (from), .max = (to)
#define NUMBER .type = FIELD_NUMBER
#define WORD_OF(name) .type = FIELD_WORD, .words = name##_words
#define DURATION .type = FIELD_DURATION
#define TEXT(bytes) .type = FIELD_TEXT, .max = (bytes)
#define STATE_DICT .type = FIELD_STATE_DICT
#define CHECKPOINT .type = FIELD_CHECKPOINT
#define GLOBS .type = FIELD_GLOBS
#define RENAMES .type = FIELD_RENAMES
#define DTYPES .type = FIELD_DTYPES
#define RANKS .type = FIELD_RANKS
#define NUMBERS .type = FIELD_NUMBERS
#define CHECKPOINTS .type = FIELD_CHECKPOINTS
#define LABELS .type = FIELD_LABELS
#define METRICS .type = FIELD_METRICS
#define LAYOUT .type = FIELD_LAYOUT
#define TRANSFORM .type = FIELD_TRANSFORM
#define VARS .type = FIELD_VARS
#define OTHER .type = FIELD_OTHER

/* The help of every option that takes layout rules. */
#define RULES "PATTERN=PLACEMENTS@MESH[:RANKS], such as 'model.*=Replicate(),Shard(0)@2x4' or '*=Shard(0)@2:0,2'; the last = " \
	"and the last @ divide it. May be repeated: the first rule that matches wins. A rule may also be given as JSON. " \
	"If all tensors that a rule matches lack a dim that it names, that is an error, unless a ? stands in front of the " \
	"rule; what falls back to another rule or to Shard(0) is told."

static const struct field fields[] = {
#define FIELD(member, c_type, at_place, its_key, its_kinds, its_type, its_fallback, its_option, its_value, its_what) \
	{ .key = its_key, .place = at_place, .kinds = its_kinds, its_type, .fallback = its_fallback, .option = its_option, \
	  .value = its_value, .what = its_what, .at = offsetof(struct spec, member) },
#define FIELD_ALSO FIELD
#include "spec/fields.def"
};

const char *field_place_key(enum field_place place)
{
	static const char *const keys[FIELD_PLACES] = { [AT_SOURCE] = "source", [AT_TARGET] = "target", [AT_A] = "a", [AT_B] = "b",
							[AT_BASE] = "base", [AT_OPTIONS] = "options", [AT_OPTIMIZER] = "optimizer",
							[AT_SPREAD] = "spread" };

	return keys[place];
}

const struct field *field_next(enum job_kind kind, const struct field *last)
{
	for (const struct field *f = last ? last + 1 : fields; f < fields + sizeof fields / sizeof *fields; f++)
		if (f->kinds >> kind & 1)
			return f;
	return NULL;
}

const char *field_word(const struct spec *spec, const void *member)
{
	const struct field *f = fields;

	while (!f->words || (const char *)spec + f->at != member)
		must(++f < fields + sizeof fields / sizeof *fields);
	return f->words[*(const unsigned *)member];
}

void field_keys(enum job_kind kind, enum field_place place, const char *const *first, const char *keys[FIELD_KEYS_MAX])
{
	size_t n = 0;

	for (; first && first[n]; n++)
		keys[n] = first[n];
	for (const struct field *f = field_next(kind, NULL); f; f = field_next(kind, f)) {
		bool listed = false;
		if (f->place != place)
			continue;
		for (size_t i = 0; i < n; i++)
			listed |= strcmp(keys[i], f->key) == 0;
		must(n < FIELD_KEYS_MAX - 1);
		if (!listed)
			keys[n++] = f->key;
	}
	keys[n] = NULL;
}

FALLIBLE enum err field_put_default(json_t *object, const char *key, json_t *fallback_new)
{
	NEED(fallback_new, "cannot fill in %s", key);
	if (json_object_get(object, key)) {
		json_decref(fallback_new);
		return OK;
	}
	if (json_object_set_new(object, key, fallback_new) != 0)
		return ERR(NO_MEMORY, "cannot fill in %s", key);
	return OK;
}

FALLIBLE enum err field_read_labels(const struct jval *v, struct arena *a, struct spec_pairs *out)
{
	const char *key;
	json_t *value;

	if (!v->j)
		return OK;
	if (!json_is_object(v->j))
		return jval_only(v, (const char *const[]){ NULL });
	if (json_object_size(v->j) > LABELS_MAX)
		return jval_fail(v, ERR_VALIDATION_FAILED, "more than %d labels", LABELS_MAX);
	if (json_object_size(v->j))
		TRY(arena_alloc(a, json_object_size(v->j), sizeof *out->v, &out->v));
	out->n = 0;
	json_object_foreach(v->j, key, value) {
		struct jval item = { value, v, key, 0 };
		struct str *text = &out->v[out->n].right;
		if (key[0] == '\0' || strlen(key) > LABEL_KEY_MAX)
			return jval_fail(&item, ERR_VALIDATION_FAILED, "a label's key has 1 to %d bytes", LABEL_KEY_MAX);
		TRY(jval_string(&item, text));
		if (text->n > LABEL_VALUE_MAX)
			return jval_fail(&item, ERR_VALIDATION_FAILED, "a label's value has at most %d bytes", LABEL_VALUE_MAX);
		out->v[out->n++].left = str_of(key);
	}
	return OK;
}

FALLIBLE enum err field_read_metrics(const struct jval *v, struct arena *a, struct spec_metrics *out)
{
	const char *key;
	json_t *value;

	if (!v->j)
		return OK;
	if (!json_is_object(v->j))
		return jval_only(v, (const char *const[]){ NULL });
	if (json_object_size(v->j) > METRICS_MAX)
		return jval_fail(v, ERR_VALIDATION_FAILED, "more than %d metrics", METRICS_MAX);
	if (json_object_size(v->j))
		TRY(arena_alloc(a, json_object_size(v->j), sizeof *out->v, &out->v));
	out->n = 0;
	json_object_foreach(v->j, key, value) {
		struct jval item = { value, v, key, 0 };
		if (key[0] == '\0' || strlen(key) > METRIC_NAME_MAX)
			return jval_fail(&item, ERR_VALIDATION_FAILED, "a metric's name has 1 to %d bytes", METRIC_NAME_MAX);
		TRY(jval_number(&item, -HUGE_VAL, &out->v[out->n].value));
		out->v[out->n++].name = str_of(key);
	}
	return OK;
}

/* Any of the spec's lists: `out` begins with a pointer to its elements, of `bytes` each, and their number. */
typedef enum err read_element(const struct jval *v, void *out);

static FALLIBLE enum err read_list(const struct jval *list, size_t max, read_element *read, size_t bytes, struct arena *a, void *out)
{
	struct { unsigned char *v; size_t n; } found = { NULL, 0 };

	TRY(jval_array(list, max, &found.n));
	if (found.n)
		TRY(arena_alloc(a, found.n, bytes, &found.v));
	for (size_t i = 0; i < found.n; i++) {
		struct jval v = jval_at(list, i);
		TRY(read(&v, found.v + i * bytes));
	}
	memcpy(out, &found, sizeof found);
	return OK;
}

static enum err read_rank(const struct jval *v, void *out)
{
	int64_t rank = 0;

	TRY(jval_integer(v, 0, SPEC_WORLD_MAX - 1, &rank));
	*(uint32_t *)out = (uint32_t)rank;
	return OK;
}

enum err field_read_ranks(const struct jval *list, struct arena *a, struct spec_ranks *out)
{
	return read_list(list, SPEC_WORLD_MAX, read_rank, sizeof *out->v, a, out);
}

static FALLIBLE enum err check_once(const struct jval *list, const struct spec_ranks *ranks)
{
	unsigned char seen[SPEC_WORLD_MAX / 8] = { 0 };

	for (size_t i = 0; i < ranks->n; i++) {
		struct jval v = jval_at(list, i);
		uint32_t rank = ranks->v[i];
		if (seen[rank / 8] & 1u << rank % 8)
			return jval_fail(&v, ERR_VALIDATION_FAILED, "rank %u is listed twice", rank);
		seen[rank / 8] |= (unsigned char)(1u << rank % 8);
	}
	return OK;
}

static FALLIBLE enum err read_dtype(const struct jval *v, struct str name, enum dtype *out)
{
	struct near near = near_begin(name);
	char hint[NEAR_HINT_MAX];

	for (int d = 0; d < DT_COUNT; d++) {
		*out = (enum dtype)d;
		if (str_is(name, dtype_name(*out)))
			return OK;
		near_try(&near, str_of(dtype_name(*out)));
	}
	return jval_fail(v, ERR_VALIDATION_FAILED, "\"%.32s\" is no dtype, such as \"bfloat16\"%s", name.p, near_text(&near, hint));
}

/* [pattern, replacement] or [glob, dtype] */
static enum err read_pair(const struct jval *pair, void *out)
{
	struct jval left = jval_at(pair, 0), right = jval_at(pair, 1);
	struct spec_pair *p = out;
	size_t two = 0;

	TRY(jval_array(pair, 2, &two));
	if (two != 2)
		return jval_fail(pair, ERR_VALIDATION_FAILED, "must be a pair of strings");
	TRY(jval_string(&left, &p->left));
	TRY(jval_string(&right, &p->right));
	if (p->left.n == 0 || p->left.n > SPEC_GLOB_BYTES_MAX || p->right.n > SPEC_GLOB_BYTES_MAX)
		return jval_fail(pair, ERR_VALIDATION_FAILED, "patterns have 1 to %d bytes", SPEC_GLOB_BYTES_MAX);
	return OK;
}

static enum err read_cast(const struct jval *v, void *out)
{
	struct jval right = jval_at(v, 1);
	struct spec_cast *c = out;
	struct spec_pair pair;

	TRY(read_pair(v, &pair));
	c->glob = pair.left;
	c->q8_0 = str_is(pair.right, SPEC_Q8_0); /* spec.c knows where that may stand */
	return c->q8_0 ? OK : read_dtype(&right, pair.right, &c->dtype);
}

static enum err read_number(const struct jval *v, void *out)
{
	return jval_number(v, -HUGE_VAL, out);
}

static enum err read_checkpoint(const struct jval *v, void *out)
{
	return ref_read(v, REF_CHECKPOINT, NULL, out);
}

static FALLIBLE enum err check_text(const struct field *f, const struct jval *v, struct str *out)
{
	TRY(jval_string(v, out));
	if (out->n == 0 || out->n > (size_t)f->max)
		return jval_fail(v, ERR_VALIDATION_FAILED, "a %s has 1 to %jd bytes", f->key, (intmax_t)f->max);
	return OK;
}

enum { DURATION_BYTES_MAX = 11 }; /* as the contract says */

static FALLIBLE enum err read_duration(const struct jval *v, int64_t *ms_out)
{
	struct str text;

	TRY(jval_string(v, &text));
	if (text.n > DURATION_BYTES_MAX || !str_to_ms(text, ms_out) || *ms_out <= 0)
		return jval_fail(v, ERR_VALIDATION_FAILED, "is no time, such as \"72h\"");
	return OK;
}

/* The value is there, given or filled in; it is read to `out`, of the row's C type. */
static FALLIBLE enum err read_value(const struct field *f, const struct jval *at, const struct jval *v, struct arena *a, void *out)
{
	size_t index = 0;

	switch (f->type) {
	case FIELD_BOOL:
		return jval_opt_bool(at, f->key, out);
	case FIELD_INTEGER:
		return jval_integer(v, f->min, f->max, out);
	case FIELD_NUMBER:
		return jval_number(v, 0, out);
	case FIELD_WORD:
		TRY(jval_opt_word(at, f->key, f->words, &index));
		*(unsigned *)out = (unsigned)index;
		return OK;
	case FIELD_TEXT:
		return check_text(f, v, out);
	case FIELD_DURATION:
		return read_duration(v, out);
	case FIELD_STATE_DICT:
		return ref_read(v, REF_STATE_DICT, NULL, out);
	case FIELD_CHECKPOINT:
		return ref_read(v, REF_CHECKPOINT, NULL, out);
	case FIELD_GLOBS:
		return jval_opt_texts(at, f->key, SPEC_GLOBS_MAX, SPEC_GLOB_BYTES_MAX, a, out);
	case FIELD_RENAMES:
		return read_list(v, SPEC_RENAMES_MAX, read_pair, sizeof(struct spec_pair), a, out);
	case FIELD_DTYPES:
		return read_list(v, SPEC_GLOBS_MAX, read_cast, sizeof(struct spec_cast), a, out);
	case FIELD_RANKS:
		TRY(field_read_ranks(v, a, out));
		return check_once(v, out);
	case FIELD_NUMBERS:
		return read_list(v, SPEC_SOURCES_MAX, read_number, sizeof(double), a, out);
	case FIELD_CHECKPOINTS:
		return read_list(v, SPEC_SOURCES_MAX, read_checkpoint, sizeof(struct ref), a, out);
	case FIELD_LABELS:
		return field_read_labels(v, a, out);
	case FIELD_METRICS:
		return field_read_metrics(v, a, out);
	case FIELD_LAYOUT:
		return layout_rules_read(v, SPEC_RULES_MAX, a, out);
	case FIELD_TRANSFORM:
	case FIELD_VARS:
	case FIELD_OTHER:
		break;
	}
	return OK;
}

/* A word's fallback has its quotes: "\"full\"". */
static unsigned word_of(const struct field *f)
{
	struct str word = { f->fallback + 1, strlen(f->fallback) - 2 };
	unsigned i = 0;

	while (f->words[i] && !str_is(word, f->words[i]))
		i++;
	must(f->words[i]);
	return i;
}

void field_fallbacks(struct spec *out)
{
	for (const struct field *f = fields; f < fields + sizeof fields / sizeof *fields; f++) {
		void *at = (char *)out + f->at;
		if (!f->fallback)
			continue;
		if (f->type == FIELD_BOOL)
			*(bool *)at = strcmp(f->fallback, "true") == 0;
		else if (f->type == FIELD_INTEGER)
			*(int64_t *)at = strtoll(f->fallback, NULL, 10);
		else if (f->type == FIELD_WORD)
			*(unsigned *)at = word_of(f);
	}
}

FALLIBLE enum err field_read(enum job_kind kind, enum field_place place, const struct jval *at, struct spec *out)
{
	for (const struct field *f = field_next(kind, NULL); f; f = field_next(kind, f)) {
		struct jval v = jval_get(at, f->key);
		if (f->place != place)
			continue;
		if (!v.j && f->fallback) {
			json_t *fallback = NULL;
			TRY(jtext_parse(str_of(f->fallback), JSON_DECODE_ANY, &fallback));
			TRY(field_put_default(at->j, f->key, fallback));
			v = jval_get(at, f->key);
		}
		/* A text or a state dict has no fallback, and is never missing where its object is there; but options may be. */
		if (v.j || (place != AT_OPTIONS && (f->type == FIELD_TEXT || f->type == FIELD_STATE_DICT)))
			TRY(read_value(f, at, &v, out->arena, (char *)out + f->at));
	}
	return OK;
}
