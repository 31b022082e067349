/* err.h: the one error idiom.
 *
 * A function that can fail returns `enum err` and is marked FALLIBLE. Where an error begins, `return ERR(CODE, "text", …)`
 * (or ERR_SYS, which adds errno) records code, place and text in a thread-local record; callers pass the code up with TRY()
 * and may add what they know (rank, FQN, file, offset) with the err_at_* functions, which keep what was set before.
 * The origin records, the main program logs or sends, nobody in between does either.
 *
 *     static FALLIBLE enum err open_item(…)
 *     {
 *             if (fd < 0)
 *                     return ERR_SYS(STORAGE_IO, "cannot open");
 *             …
 *     }
 *     enum err e = open_item(…);
 *     if (e)
 *             return err_at_file(e, name, offset);
 *
 * Programmer errors are must(): always on, they abort. Bytes from outside never reach a must().
 */
#pragma once
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stddef.h>

#define FALLIBLE __attribute__((warn_unused_result))
#define PRINTF_LIKE(a, b) __attribute__((format(printf, a, b)))

enum err {
	OK = 0,
#define X(name, blast, status, retry, title) ERR_##name,
#include "base/err.def"
#undef X
	ERR_COUNT
};

enum err_blast { ERR_BLAST_REQUEST, ERR_BLAST_JOB, ERR_BLAST_GANG, ERR_BLAST_DAEMON };

enum { ERR_TEXT_MAX = 1024, ERR_FQN_MAX = 512, ERR_FILE_MAX = 320, ERR_VALUE_MAX = 128 };

/* Details of this thread's latest error. Empty strings and -1 mean "not known". */
struct err_info {
	enum err code;
	int sys_errno;             /* 0 if no system call failed */
	const char *place;         /* "file.c:123" */
	char text[ERR_TEXT_MAX];   /* one sentence, no trailing full stop */
	char fqn[ERR_FQN_MAX];
	char file[ERR_FILE_MAX];   /* relative to the checkpoint, to the storage where several are read; never a host path */
	int64_t rank, offset;
	char expected[ERR_VALUE_MAX], actual[ERR_VALUE_MAX];
	char pointer[ERR_VALUE_MAX]; /* JSON pointer to the field of a request, "/target/name" */
	bool in_doubt;             /* what the job is to write or remove may be written or removed in spite of the error */
};

void err_record(enum err code, int sys_errno, const char *place, const char *fmt, ...)
	PRINTF_LIKE(4, 5);
#define ERR_STR2(x) #x
#define ERR_STR(x) ERR_STR2(x)
#define ERR_PLACE __FILE__ ":" ERR_STR(__LINE__)
/* The comma keeps the code a constant that the compiler can see. */
#define ERR(code, ...) (err_record(ERR_##code, 0, ERR_PLACE, __VA_ARGS__), ERR_##code)
#define ERR_SYS(code, ...) (err_record(ERR_##code, errno, ERR_PLACE, __VA_ARGS__), ERR_##code)

#define TRY(expr)                                  \
	do {                                       \
		enum err try_err_ = (expr);        \
		if (try_err_ != OK)                \
			return try_err_;           \
	} while (0)

/* Fails with ERR_NO_MEMORY and the message if what was to be made is NULL. */
#define NEED(made, ...)                                     \
	do {                                                \
		if (!(made))                                \
			return ERR(NO_MEMORY, __VA_ARGS__); \
	} while (0)

/* Each returns the code it was given, so that `return err_at_rank(e, r);` works; a field set earlier is kept. */
enum err err_at_rank(enum err code, int64_t rank);
enum err err_in_doubt(enum err code);
enum err err_at_fqn(enum err code, const char *fqn, size_t len);
enum err err_at_file(enum err code, const char *file, int64_t offset); /* offset -1: not known */
enum err err_expected(enum err code, const char *expected, const char *actual); /* either may be NULL */
enum err err_at_pointer(enum err code, const char *pointer);

const struct err_info *err_last(void);            /* this thread's record */
void err_restore(const struct err_info *info);    /* puts back a record saved by copy */
void err_clear(void);

const char *err_code_name(enum err code);         /* "checkpoint_exists" */
const char *err_title(enum err code);
int err_http_status(enum err code);
bool err_retryable(enum err code);
enum err_blast err_blast(enum err code);
enum err err_from_name(const char *code_name);    /* ERR_INTERNAL when unknown */

_Noreturn void must_failed(const char *what, const char *place);
#define must(cond) ((cond) ? (void)0 : must_failed(#cond, ERR_PLACE))

/* move(x): hands ownership on; x is NULL afterwards (for variables with a CLEANUP attribute). */
#define CLEANUP(fn) __attribute__((cleanup(fn)))
#define move(x)                            \
	({                                 \
		__typeof__(x) moved_ = (x); \
		(x) = NULL;                \
		moved_;                    \
	})
