/* err.c: the thread-local error record and the catalogue's tables (see err.h). */
#include "base/err.h"

#include <execinfo.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct {
	const char *name, *title;
	int status;
	bool retryable;
	enum err_blast blast;
} catalogue[ERR_COUNT] = {
	[OK] = { "ok", "No error", 200, false, ERR_BLAST_REQUEST },
#define X(n, blast_, status_, retry_, title_) \
	[ERR_##n] = { #n, title_, status_, retry_, ERR_BLAST_##blast_ },
#include "base/err.def"
#undef X
};

static _Thread_local struct err_info last = { .rank = -1, .offset = -1 };

/* Copies at most max-1 bytes and never cuts a UTF-8 sequence in two. */
static void copy_text(char *dst, size_t max, const char *src, size_t len)
{
	size_t n = len < max - 1 ? len : max - 1;

	while (n < len && n > 0 && ((unsigned char)src[n] & 0xC0) == 0x80)
		n--;
	memcpy(dst, src, n);
	dst[n] = '\0';
}

void err_record(enum err code, int sys_errno, const char *place, const char *fmt, ...)
{
	va_list ap;

	err_clear();
	last.code = code;
	last.sys_errno = sys_errno;
	last.place = place;
	va_start(ap, fmt);
	int n = vsnprintf(last.text, sizeof last.text, fmt, ap);
	va_end(ap);
	if (n < 0)
		last.text[0] = '\0';
	if (sys_errno != 0) {
		size_t used = strlen(last.text);
		char why[128];
		snprintf(last.text + used, sizeof last.text - used, ": %s",
			 strerror_r(sys_errno, why, sizeof why));
	}
}

enum err err_at_rank(enum err code, int64_t rank)
{
	if (code && last.rank < 0)
		last.rank = rank;
	return code;
}

enum err err_in_doubt(enum err code)
{
	last.in_doubt = last.in_doubt || code;
	return code;
}

enum err err_at_fqn(enum err code, const char *fqn, size_t len)
{
	if (code && !last.fqn[0])
		copy_text(last.fqn, sizeof last.fqn, fqn, len);
	return code;
}

enum err err_at_file(enum err code, const char *file, int64_t offset)
{
	if (code && !last.file[0])
		copy_text(last.file, sizeof last.file, file, strlen(file));
	if (code && last.offset < 0)
		last.offset = offset;
	return code;
}

enum err err_expected(enum err code, const char *expected, const char *actual)
{
	if (code && !last.expected[0] && !last.actual[0]) {
		if (expected)
			copy_text(last.expected, sizeof last.expected, expected, strlen(expected));
		if (actual)
			copy_text(last.actual, sizeof last.actual, actual, strlen(actual));
	}
	return code;
}

enum err err_at_pointer(enum err code, const char *pointer)
{
	if (code && !last.pointer[0])
		copy_text(last.pointer, sizeof last.pointer, pointer, strlen(pointer));
	return code;
}

const struct err_info *err_last(void)
{
	return &last;
}

void err_restore(const struct err_info *info)
{
	last = *info;
}

void err_clear(void)
{
	memset(&last, 0, sizeof last);
	last.rank = -1;
	last.offset = -1;
}

/* The catalogue's names are upper case; the API's codes are the same in lower case. */
static const char *lower_name(enum err code)
{
	static _Thread_local char name[64];
	const char *from = catalogue[code].name;
	size_t i;

	for (i = 0; from[i] && i < sizeof name - 1; i++)
		name[i] = (char)(from[i] >= 'A' && from[i] <= 'Z' ? from[i] + 32 : from[i]);
	name[i] = '\0';
	return name;
}

const char *err_code_name(enum err code)
{
	must(code < ERR_COUNT);
	return lower_name(code);
}

const char *err_title(enum err code)
{
	must(code < ERR_COUNT);
	return catalogue[code].title;
}

int err_http_status(enum err code)
{
	must(code < ERR_COUNT);
	return catalogue[code].status;
}

bool err_retryable(enum err code)
{
	must(code < ERR_COUNT);
	return catalogue[code].retryable;
}

enum err_blast err_blast(enum err code)
{
	must(code < ERR_COUNT);
	return catalogue[code].blast;
}

enum err err_from_name(const char *code_name)
{
	for (unsigned i = 0; i < ERR_COUNT; i++)
		if (strcmp(lower_name((enum err)i), code_name) == 0)
			return (enum err)i;
	return ERR_INTERNAL;
}

_Noreturn void must_failed(const char *what, const char *place)
{
	void *frames[32];

	fprintf(stderr, "BUG: must(%s) failed at %s\n", what, place);
	backtrace_symbols_fd(frames, backtrace(frames, 32), STDERR_FILENO);
	abort();
}
