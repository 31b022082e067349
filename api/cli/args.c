/* args.c: see args.h. Names are not checked here: the daemon does it, with better words, and must do it anyway. */
#include "api/cli/args.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/buf.h"
#include "base/near.h"

const char args_global[] = "json output= columns= url= help timeout=";

/* Is `name` in the space-separated list? *valued_out: it takes a value. */
static bool listed(const char *list, const char *name, size_t n, bool *valued_out)
{
	while (*list) {
		size_t w = strcspn(list, " ");
		bool valued = w > 0 && list[w - 1] == '=';
		if (w - valued == n && memcmp(list, name, n) == 0) {
			*valued_out = valued;
			return true;
		}
		list += w + strspn(list + w, " ");
	}
	return false;
}

static void try_all(struct near *near, const char *list)
{
	while (*list) {
		size_t w = strcspn(list, " ");
		char name[NEAR_WORD_MAX];
		snprintf(name, sizeof name, "--%.*s", (int)(w - (w > 0 && list[w - 1] == '=')), list);
		near_try(near, str_of(name));
		list += w + strspn(list + w, " ");
	}
}

static enum err unknown_option(const char *given, size_t n, const char *allowed)
{
	struct near near = near_begin((struct str){ given, n });
	char hint[NEAR_HINT_MAX];

	try_all(&near, allowed);
	try_all(&near, args_global);
	return ERR(INVALID_REQUEST, "this command has no option %.*s%s", (int)n, given, near_text(&near, hint));
}

static FALLIBLE enum err parse_option(struct args *a, int argc, char *const *argv, int *at, const char *allowed)
{
	const char *name = argv[*at] + 2, *equals = strchr(name, '='), *value = equals ? equals + 1 : NULL;
	size_t n = equals ? (size_t)(equals - name) : strlen(name);
	bool valued = false;

	if (!listed(allowed, name, n, &valued) && !listed(args_global, name, n, &valued))
		return unknown_option(argv[*at], 2 + n, allowed);
	if (!valued && value)
		return ERR(INVALID_REQUEST, "--%.*s takes no value", (int)n, name);
	if (valued && !value) {
		if (*at + 1 >= argc)
			return ERR(INVALID_REQUEST, "--%s needs a value", name);
		value = argv[++*at];
	}
	if (a->option_count == ARGS_MAX)
		return ERR(INVALID_REQUEST, "more than %d options", ARGS_MAX);
	a->options[a->option_count].name = argv[equals ? *at : *at - (valued ? 1 : 0)] + 2;
	a->options[a->option_count++].value = value;
	return OK;
}

FALLIBLE enum err args_parse(int argc, char *const *argv, const char *allowed, struct args *out)
{
	bool words_only = false;

	*out = (struct args){ 0 };
	for (int i = 0; i < argc; i++) {
		if (!words_only && strcmp(argv[i], "--") == 0) {
			words_only = true;
		} else if (!words_only && strcmp(argv[i], "-h") == 0) {
			out->options[out->option_count++].name = "help";
		} else if (!words_only && argv[i][0] == '-' && argv[i][1] == '-') {
			TRY(parse_option(out, argc, argv, &i, allowed));
		} else if (!words_only && argv[i][0] == '-' && argv[i][1]) {
			return ERR(INVALID_REQUEST, "options begin with two dashes: %.32s", argv[i]);
		} else {
			if (out->word_count == ARGS_MAX)
				return ERR(INVALID_REQUEST, "more than %d arguments", ARGS_MAX);
			out->words[out->word_count++] = argv[i];
		}
		if (out->option_count == ARGS_MAX)
			return ERR(INVALID_REQUEST, "more than %d options", ARGS_MAX - 1);
	}
	return OK;
}

static bool option_is(const char *given, const char *name)
{
	size_t n = strlen(name);

	return strncmp(given, name, n) == 0 && (given[n] == '\0' || given[n] == '=');
}

const char *args_next(const struct args *a, const char *name, unsigned *at)
{
	while (*at < a->option_count) {
		unsigned i = (*at)++;
		if (option_is(a->options[i].name, name))
			return a->options[i].value ? a->options[i].value : "";
	}
	return NULL;
}

const char *args_value(const struct args *a, const char *name)
{
	const char *last = NULL, *value;
	unsigned at = 0;

	while ((value = args_next(a, name, &at)))
		last = value;
	return last;
}

bool args_flag(const struct args *a, const char *name)
{
	return args_value(a, name) != NULL;
}

bool args_is_shm(const char *text)
{
	return strncmp(text, "shm:", 4) == 0;
}

static FALLIBLE enum err made(json_t *value, json_t **out)
{
	if (!value)
		return ERR(INVALID_REQUEST, "an argument is not UTF-8");
	*out = value;
	return OK;
}

FALLIBLE enum err args_ref(const char *text, json_t **out)
{
	const char *colon = strchr(text, ':');

	if (!colon || colon == text || !colon[1])
		return ERR(INVALID_REQUEST, "\"%.200s\" is no reference: STORAGE:NAME or shm:NAME", text);
	const char *slash = args_is_shm(text) ? strchr(text, '/') : NULL;
	if (slash)
		return made(json_pack("{s:s,s:s%}", "state_dict", slash + 1, "node", text + 4, (size_t)(slash - text - 4)), out);
	if (args_is_shm(text))
		return made(json_pack("{s:s}", "state_dict", text + 4), out);
	return made(json_pack("{s:s%,s:s}", "storage", text, (size_t)(colon - text), "name", colon + 1), out);
}

/* "2x4" or "2x4:0,1,4,5" into the rule. false: it is none. */
static bool add_mesh(json_t *rule, const char *text)
{
	json_t *mesh = json_array(), *ranks = NULL;
	bool ok = mesh != NULL;
	char *end = NULL;

	while (ok) {
		ok = *text >= '0' && *text <= '9';
		long n = ok ? strtol(text, &end, 10) : 0;
		ok = ok && json_array_append_new(ranks ? ranks : mesh, json_integer(n)) == 0;
		if (!ok || *end == '\0')
			break;
		text = end + 1;
		if (!ranks && *end == ':') {
			ranks = json_array();
			ok = ranks != NULL;
		} else {
			ok = *end == (ranks ? ',' : 'x');
		}
	}
	if (ok && json_object_set(rule, "mesh", mesh) == 0 && ranks)
		ok = json_object_set(rule, "ranks", ranks) == 0;
	json_decref(mesh);
	json_decref(ranks);
	return ok;
}

/* Divides at commas that are not inside parentheses. */
static FALLIBLE enum err add_placements(json_t *rule, struct str text)
{
	json_t *list = json_array();
	size_t from = 0;
	int depth = 0;

	if (!list || json_object_set_new(rule, "placements", list) != 0)
		return ERR(NO_MEMORY, "cannot keep a layout");
	for (size_t i = 0; i <= text.n; i++) {
		char c = i < text.n ? text.p[i] : ',';
		depth += (c == '(') - (c == ')');
		if (c != ',' || (depth > 0 && i < text.n))
			continue;
		while (from < i && text.p[from] == ' ')
			from++;
		if (from == i)
			return ERR(INVALID_REQUEST, "an empty placement in \"%.*s\"", (int)text.n, text.p);
		if (json_array_append_new(list, json_stringn(text.p + from, i - from)) != 0)
			return ERR(INVALID_REQUEST, "a placement is not UTF-8");
		from = i + 1;
	}
	return OK;
}

/* The last '=' that is not inside parentheses: Shard(dim=0) has one too. */
static const char *last_equals(const char *from, const char *end)
{
	int depth = 0;

	while (end > from) {
		char c = *--end;
		depth += (c == ')') - (c == '(');
		if (c == '=' && depth == 0)
			return end;
	}
	return NULL;
}

static FALLIBLE enum err parse_rule(const char *text, json_t *rule)
{
	const char *at = strrchr(text, '@'), *end = text + strlen(text), *equals;

	/* An '@' of the pattern: the rule has no mesh, that is, one dim over the world. */
	if (at && last_equals(at, end))
		at = NULL;
	if (at && !add_mesh(rule, at + 1))
		return ERR(INVALID_REQUEST, "\"%.100s\" is no mesh, such as 2x4 or 2x2:0,1,4,5", at + 1);
	if (at)
		end = at;
	equals = last_equals(text, end);
	if (!equals || equals == text)
		return ERR(INVALID_REQUEST, "\"%.200s\" is no layout rule: PATTERN=PLACEMENTS@MESH", text);
	if (json_object_set_new(rule, "match", json_stringn(text, (size_t)(equals - text))) != 0)
		return ERR(INVALID_REQUEST, "a pattern is not UTF-8");
	return add_placements(rule, (struct str){ equals + 1, (size_t)(end - equals - 1) });
}

FALLIBLE enum err args_layout(const char *text, json_t **rule_out)
{
	bool optional = text[0] == '?';
	json_error_t why;

	text += optional;
	json_t *rule = text[0] == '{' ? json_loads(text, JSON_REJECT_DUPLICATES, &why) : json_object();
	enum err e = OK;

	if (!rule && text[0] == '{')
		return ERR(INVALID_REQUEST, "a layout rule is no JSON: column %d: %s", why.column, why.text);
	NEED(rule, "cannot keep a layout");
	if (text[0] != '{')
		e = parse_rule(text, rule);
	if (!e && optional && json_object_set_new(rule, "optional", json_true()) != 0)
		e = ERR(NO_MEMORY, "cannot keep a layout");
	if (e)
		json_decref(rule);
	else
		*rule_out = rule;
	return e;
}

/* Copies up to the delimiter; \D is the delimiter itself. *p stands behind the delimiter afterwards. */
static bool take_part(const char **p, char delimiter, bool replacement, struct buf *out)
{
	for (const char *s = *p; *s; s++) {
		if (*s == delimiter) {
			*p = s + 1;
			return true;
		}
		if (s[0] == '\\' && s[1] == delimiter) {
			buf_putc(out, (unsigned char)*++s);
		} else if (replacement && s[0] == '\\' && s[1] >= '0' && s[1] <= '9') {
			buf_printf(out, "${%c}", *++s);
		} else if (s[0] == '\\' && s[1]) {
			buf_putc(out, (unsigned char)*s++);
			buf_putc(out, (unsigned char)*s);
		} else {
			buf_putc(out, (unsigned char)*s);
		}
	}
	return false;
}

FALLIBLE enum err args_rename(const char *text, json_t **pair_out)
{
	CLEANUP(buf_free) struct buf pattern = BUF_INIT(64 << 10);
	CLEANUP(buf_free) struct buf replacement = BUF_INIT(64 << 10);
	char delimiter = text[0] == 's' ? text[1] : '\0';
	const char *p = text + 2;

	if (delimiter == '\0' || delimiter == '\\' || (delimiter >= '0' && delimiter <= '9') || delimiter == ' ' ||
	    !take_part(&p, delimiter, false, &pattern) || !take_part(&p, delimiter, true, &replacement) || *p)
		return ERR(INVALID_REQUEST, "\"%.200s\" is no rename: s/PATTERN/REPLACEMENT/", text);
	TRY(buf_status(&pattern));
	TRY(buf_status(&replacement));
	return made(json_pack("[s%,s%]", pattern.p ? (char *)pattern.p : "", pattern.len,
			      replacement.p ? (char *)replacement.p : "", replacement.len), pair_out);
}

FALLIBLE enum err args_pair(const char *text, json_t **pair_out)
{
	const char *equals = strrchr(text, '=');

	if (!equals || equals == text || !equals[1])
		return ERR(INVALID_REQUEST, "\"%.200s\" has not the form GLOB=DTYPE", text);
	return made(json_pack("[s%,s]", text, (size_t)(equals - text), equals + 1), pair_out);
}

FALLIBLE enum err args_duration(const char *text, int64_t *ms_out)
{
	static const struct {
		const char *unit;
		int64_t ms;
	} units[] = { { "ms", 1 }, { "s", 1000 }, { "", 1000 }, { "m", 60000 }, { "h", 3600000 } };
	char *end = NULL;
	double n = strtod(text, &end);

	for (size_t i = 0; i < sizeof units / sizeof *units; i++)
		if (end > text && strcmp(end, units[i].unit) == 0 && n >= 0 && n < 1e9) {
			*ms_out = (int64_t)(n * (double)units[i].ms);
			return OK;
		}
	return ERR(INVALID_REQUEST, "\"%.50s\" is no duration, such as 90s, 500ms or 5m", text);
}

FALLIBLE enum err args_file(const char *option, const char *path, json_t **out)
{
	json_error_t why;

	*out = json_load_file(path, JSON_REJECT_DUPLICATES, &why);
	return *out ? OK : ERR(INVALID_REQUEST, "--%s %s: line %d: %s", option, path, why.line, why.text);
}
