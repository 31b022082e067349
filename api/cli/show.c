/* show.c: see show.h. Text from the daemon may hold any characters, so control characters never reach the terminal as they are. */
#include "api/cli/show.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "api/cli/term.h"
#include "base/buf.h"
#include "base/jtext.h"
#include "base/mem.h"
#include "base/str.h"

enum { DAMAGE_SHOWN = 20, TEXT_MAX = 64 << 20 };

const json_t *show_at(const json_t *doc, const char *path)
{
	char key[64];

	while (doc && *path) {
		size_t n = strcspn(path, ".");
		snprintf(key, sizeof key, "%.*s", (int)n, path);
		doc = json_object_get(doc, key);
		path += n + (path[n] == '.');
	}
	return doc;
}

const char *show_text(const json_t *doc, const char *path)
{
	const char *text = json_string_value(show_at(doc, path));

	return text ? text : "";
}

double show_number(const json_t *doc, const char *path)
{
	return json_number_value(show_at(doc, path));
}

const char *show_bytes(double bytes, char out[32])
{
	static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB" };
	size_t u = 0;

	while (bytes >= 1024 && u < 5) {
		bytes /= 1024;
		u++;
	}
	snprintf(out, 32, u == 0 ? "%.0f %s" : bytes < 10 ? "%.2f %s" : bytes < 100 ? "%.1f %s" : "%.0f %s", bytes, units[u]);
	return out;
}

const char *show_seconds(double s, char out[32])
{
	long n = (long)(s + 0.5);

	if (s < 60)
		snprintf(out, 32, s < 10 ? "%.1fs" : "%.0fs", s);
	else if (n < 3600)
		snprintf(out, 32, "%ld:%02ld", n / 60, n % 60);
	else
		snprintf(out, 32, "%ld:%02ld:%02ld", n / 3600, n / 60 % 60, n % 60);
	return out;
}

void show_put_clean(struct buf *b, const char *text)
{
	term_clean(b, text, strlen(text), false);
}

static void put_text(FILE *to, const char *format, va_list ap)
{
	CLEANUP(buf_free) struct buf clean = BUF_INIT(TEXT_MAX);
	va_list again;

	va_copy(again, ap);
	int n = vsnprintf(NULL, 0, format, again);
	va_end(again);
	CLEANUP(mem_free_ptr) char *text = n < 0 ? NULL : mem_alloc((uint64_t)n + 1);
	if (!text)
		return;
	vsnprintf(text, (size_t)n + 1, format, ap);
	term_clean(&clean, text, (size_t)n, true);
	if (buf_status(&clean) == OK)
		fwrite(clean.p, 1, clean.len, to);
}

void show_say(const char *format, ...)
{
	va_list ap;

	va_start(ap, format);
	if (show_form() == SHOW_TABLE)
		put_text(stdout, format, ap);
	va_end(ap);
}

void show_out(const char *format, ...)
{
	va_list ap;

	va_start(ap, format);
	put_text(stdout, format, ap);
	va_end(ap);
}

void show_note(const char *format, ...)
{
	va_list ap;

	va_start(ap, format);
	put_text(stderr, format, ap);
	va_end(ap);
}

static void put_field(struct buf *b, const char *key, const char *value)
{
	if (!value[0])
		return;
	buf_printf(b, ", %s ", key);
	show_put_clean(b, value);
}

/* Unless the text names it already, as one rank or among several. */
static void put_rank(struct buf *b, const char *text, intmax_t rank)
{
	char digits[24];
	size_t n = (size_t)snprintf(digits, sizeof digits, "%jd", rank);

	for (const char *at = strstr(text, "rank"); at && (at = strstr(at, digits)) != NULL; at += n)
		if (!isalnum((unsigned char)at[-1]) && !isalnum((unsigned char)at[n]))
			return;
	buf_printf(b, ", rank %s", digits);
}

static void print_line(struct buf *b, enum term_colour c)
{
	if (buf_status(b) == OK)
		fprintf(stderr, "%sdcpctl:%s %.*s\n", term_colour(stderr, c), term_colour(stderr, TERM_PLAIN), (int)b->len, (char *)b->p);
}

void show_error(void)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(16384);
	const struct err_info *e = err_last();

	buf_printf(&b, "%s: ", err_code_name(e->code));
	show_put_clean(&b, e->text[0] ? e->text : err_title(e->code));
	put_field(&b, "fqn", e->fqn);
	put_field(&b, "file", e->file);
	if (e->offset >= 0)
		buf_printf(&b, ", offset %jd", (intmax_t)e->offset);
	if (e->rank >= 0)
		put_rank(&b, e->text, e->rank);
	put_field(&b, "expected", e->expected);
	put_field(&b, "actual", e->actual);
	print_line(&b, TERM_RED);
}

static void put_dims(struct buf *b, const json_t *dims)
{
	size_t i;
	json_t *d;

	buf_putc(b, '[');
	json_array_foreach(dims, i, d)
		buf_printf(b, "%s%jd", i ? ", " : "", (intmax_t)json_integer_value(d));
	buf_putc(b, ']');
}

static void put_words(struct buf *b, const json_t *words)
{
	size_t i;
	json_t *word;

	json_array_foreach(words, i, word) {
		buf_puts(b, i ? ", " : "");
		show_put_clean(b, json_string_value(word) ?: "");
	}
}

static int put_chunk(const char *p, size_t n, void *user)
{
	buf_put(user, p, n);
	return 0;
}

static void put_ref(struct buf *b, const json_t *ref)
{
	const char *state_dict = show_text(ref, "state_dict");

	buf_puts(b, state_dict[0] ? "shm" : show_text(ref, "storage"));
	buf_putc(b, ':');
	if (show_text(ref, "node")[0]) {
		show_put_clean(b, show_text(ref, "node"));
		buf_putc(b, '/');
	}
	show_put_clean(b, state_dict[0] ? state_dict : show_text(ref, "name"));
}

void show_verdict(struct buf *b, const json_t *v)
{
	show_put_clean(b, show_text(v, "state"));
	buf_putc(b, ' ');
	show_put_clean(b, show_text(v, "level"));
	buf_putc(b, ' ');
	show_put_clean(b, show_text(v, "at"));
}

void show_put_cell(struct buf *b, const json_t *item, const char *column, bool raw)
{
	const char *key = strchr(column, '=') + 1, *form = strchr(key, ':'), *end = form ? form : key + strlen(key);
	char path[64], text[32];
	const json_t *v = NULL;

	for (; !v && key < end; key++) {
		const char *begin = key;
		key += strcspn(key, "|:");
		snprintf(path, sizeof path, "%.*s", (int)(key - begin), begin);
		v = show_at(item, path);
	}
	if (!v || json_is_null(v) || (json_is_string(v) && json_string_length(v) == 0))
		buf_puts(b, raw ? "" : "-");
	else if (!raw && form && strcmp(form, ":bytes") == 0)
		buf_puts(b, show_bytes(json_number_value(v), text));
	else if (form && strcmp(form, ":dims") == 0)
		put_dims(b, v);
	else if (!raw && form && strcmp(form, ":words") == 0)
		put_words(b, v);
	else if (form && strcmp(form, ":ref") == 0)
		put_ref(b, v);
	else if (form && strcmp(form, ":verdict") == 0)
		show_verdict(b, v);
	else if (form && strcmp(form, ":count") == 0)
		buf_printf(b, "%zu", json_array_size(v));
	else if (json_is_string(v) && raw)
		buf_put(b, json_string_value(v), json_string_length(v));
	else if (json_is_string(v))
		show_put_clean(b, json_string_value(v));
	else
		(void)json_dump_callback(v, put_chunk, b, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(6));
}

/* The first of what a verify found. */
static void show_damage(const json_t *p)
{
	static const char *const columns[] = { "FILE=file",	"RANK=rank",   "TENSOR=fqn",
					       "OFFSET=offset", "BYTES=bytes", "WHAT=part|code", NULL };
	const json_t *damage = show_at(p, "damage");
	size_t listed = json_array_size(damage), shown = listed < DAMAGE_SHOWN ? listed : DAMAGE_SHOWN;
	double all = show_number(p, "damage_count");

	if (listed == 0)
		return;
	show_grid(stderr, damage, shown, columns);
	if (all > (double)shown)
		fprintf(stderr, "and %.0f more%s\n", all - (double)shown, listed > shown ? " (--json lists them)" : "");
}

void show_problem(const json_t *p)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(16384);
	const char *detail = show_text(p, "detail");

	show_put_clean(&b, show_text(p, "code"));
	buf_puts(&b, ": ");
	show_put_clean(&b, detail[0] ? detail : show_text(p, "title"));
	put_field(&b, "fqn", show_text(p, "fqn"));
	put_field(&b, "file", show_text(p, "file"));
	if (json_is_integer(show_at(p, "offset")))
		buf_printf(&b, ", offset %.0f", show_number(p, "offset"));
	if (json_is_integer(show_at(p, "rank")))
		put_rank(&b, detail, (intmax_t)show_number(p, "rank"));
	put_field(&b, "expected", show_text(p, "expected"));
	put_field(&b, "actual", show_text(p, "actual"));
	print_line(&b, TERM_RED);
	show_damage(p);
}

void show_warning(const char *text)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(16384);

	buf_puts(&b, "warning: ");
	show_put_clean(&b, text);
	print_line(&b, TERM_YELLOW);
}

static int print_part(const char *p, size_t n, void *)
{
	for (size_t i = 0; i < n; i++)
		if (p[i] == 0x7f) /* DEL: the one control character that JSON leaves alone */
			fputs("\\u007f", stdout);
		else
			putchar(p[i]);
	return 0;
}

/* Escapes what is beyond ASCII on a terminal: characters there may turn the direction of a line. */
static void print_json(const json_t *doc, size_t flags)
{
	flags |= JSON_ENCODE_ANY | jtext_real_flags(doc) | (term_is(stdout) ? JSON_ENSURE_ASCII : 0);
	(void)json_dump_callback(doc, print_part, NULL, flags);
}

void show_json(const json_t *doc)
{
	if (doc)
		print_json(doc, JSON_INDENT(2));
	putchar('\n');
}

void show_line(const json_t *doc)
{
	print_json(doc, JSON_COMPACT);
	putchar('\n');
}
