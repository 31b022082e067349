/* t.h: what every cmocka test includes, in the order cmocka needs. */
#pragma once
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#include "base/err.h"

/* A peer that is not there by then hangs. Waits have no closer limit: a busy machine is no failure. */
enum { T_HUNG_MS = 120000 };

/* abort() tells the compiler that a failed test does not go on. */
#define T_FAIL(...)                  \
	do {                         \
		fail_msg(__VA_ARGS__); \
		abort();             \
	} while (0)

/* The call must succeed; the error's text is shown if it does not. */
#define T_OK(call)                                                                           \
	do {                                                                                 \
		enum err t_e_ = (call);                                                      \
		if (t_e_)                                                                    \
			T_FAIL("%s: %s: %s (%s)", #call, err_code_name(t_e_), err_last()->text, \
			       err_last()->place);                                           \
	} while (0)

/* The call must fail with ERR_<code>. */
#define T_ERR(code, call)                                                                        \
	do {                                                                                     \
		enum err t_e_ = (call);                                                          \
		if (t_e_ != ERR_##code)                                                          \
			T_FAIL("%s: got %s (%s), expected " #code, #call, err_code_name(t_e_),   \
			       t_e_ ? err_last()->text : "");                                    \
	} while (0)
