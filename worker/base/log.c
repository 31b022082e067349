/* log.c: formats an event as logfmt or JSON and writes it with one write(2), so that lines of processes do not mix. */
#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"

static struct {
	char role[32];
	bool json;
	enum log_level level;
} settings = { "dcpd", false, LOG_LEVEL_INFO };

static const char *const level_names[] = { "error", "warn", "info", "debug" };

void log_init(const char *role, bool json, enum log_level level)
{
	snprintf(settings.role, sizeof settings.role, "%s", role);
	settings.json = json;
	settings.level = level;
}

static bool is_bare(const char *v)
{
	return *v && strspn(v, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:/+-@%") == strlen(v);
}

static void put_pair(struct buf *line, const char *key, const char *value)
{
	if (settings.json) {
		buf_puts(line, ",");
		buf_json_str(line, str_of(key));
		buf_puts(line, ":");
		buf_json_str(line, str_of(value));
		return;
	}
	buf_printf(line, " %s=", key);
	if (is_bare(value))
		buf_puts(line, value);
	else
		buf_json_str(line, str_of(value));
}

static void put_head(struct buf *line, enum log_level level, const char *event)
{
	char stamp[CLOCK_TEXT_MAX];

	clock_text(clock_wall_ms(), stamp);
	if (settings.json) {
		buf_printf(line, "{\"time\":\"%s\",\"level\":\"%s\",\"role\":\"%s\",\"event\":", stamp,
			   level_names[level], settings.role);
		buf_json_str(line, str_of(event));
		return;
	}
	buf_printf(line, "%s %s [%s] %s", stamp, level_names[level], settings.role, event);
}

static void put_pairs(struct buf *line, va_list ap)
{
	for (const char *key = va_arg(ap, const char *); key; key = va_arg(ap, const char *)) {
		const char *value = va_arg(ap, const char *);
		if (value)
			put_pair(line, key, value);
	}
}

static void finish(struct buf *line)
{
	buf_puts(line, settings.json ? "}\n" : "\n");
	if (line->len && !line->failed && write(STDERR_FILENO, line->p, line->len) < 0)
		return; /* nowhere left to say so */
}

void log_event(enum log_level level, const char *event, ...)
{
	va_list ap;

	if (level > settings.level)
		return;
	CLEANUP(buf_free) struct buf line = BUF_INIT(16384);
	put_head(&line, level, event);
	va_start(ap, event);
	put_pairs(&line, ap);
	va_end(ap);
	finish(&line);
}

void log_err(const char *event, ...)
{
	struct err_info info = *err_last();
	char number[32];
	va_list ap;

	CLEANUP(buf_free) struct buf line = BUF_INIT(16384);
	put_head(&line, LOG_LEVEL_ERROR, event);
	va_start(ap, event);
	put_pairs(&line, ap);
	va_end(ap);
	put_pair(&line, "code", err_code_name(info.code));
	put_pair(&line, "detail", info.text);
	if (info.rank >= 0) {
		snprintf(number, sizeof number, "%jd", (intmax_t)info.rank);
		put_pair(&line, "rank", number);
	}
	if (info.fqn[0])
		put_pair(&line, "fqn", info.fqn);
	if (info.file[0])
		put_pair(&line, "file", info.file);
	if (info.offset >= 0) {
		snprintf(number, sizeof number, "%jd", (intmax_t)info.offset);
		put_pair(&line, "offset", number);
	}
	if (info.place)
		put_pair(&line, "place", info.place);
	finish(&line);
	err_restore(&info);
}
