/* curl_late.c: libcurl, opened when it is first called. dcpd and dcpd-worker have this file in its place: libcurl brings 28 libraries
 * along, and loading them was nearly half of a worker's start, while most daemons and workers never talk HTTP. A library that cannot be
 * opened fails as libcurl itself would. (ELF knows no libraries that are loaded at the first call.) */
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>

#include "base/log.h"

#pragma GCC visibility push(hidden) /* libcurl's own calls of these stay within it */
#include <curl/curl.h>
#pragma GCC visibility pop
#undef curl_easy_setopt /* macros that check types */
#undef curl_easy_getinfo
#undef curl_share_setopt

#if LIBCURL_VERSION_NUM >= 0x080000
#define CURLU_READ const CURLU
#else
#define CURLU_READ CURLU
#endif
#define SAID "libcurl cannot be opened"

/* X: result, function, parameters, their names, what it returns without the library. V: of functions without a result. */
#define CURL_CALLS(X, V)                                                                                                            \
	X(CURLcode, curl_global_init, (long flags), (flags), CURLE_FAILED_INIT)                                                     \
	X(CURL *, curl_easy_init, (void), (), NULL)                                                                                 \
	X(CURLcode, curl_easy_perform, (CURL * c), (c), CURLE_FAILED_INIT)                                                          \
	X(const char *, curl_easy_strerror, (CURLcode code), (code), SAID)                                                          \
	V(curl_easy_reset, (CURL * c), (c))                                                                                         \
	V(curl_easy_cleanup, (CURL * c), (c))                                                                                       \
	X(CURLM *, curl_multi_init, (void), (), NULL)                                                                               \
	X(CURLMcode, curl_multi_add_handle, (CURLM * m, CURL * c), (m, c), CURLM_INTERNAL_ERROR)                                    \
	X(CURLMcode, curl_multi_remove_handle, (CURLM * m, CURL * c), (m, c), CURLM_INTERNAL_ERROR)                                 \
	X(CURLMcode, curl_multi_perform, (CURLM * m, int *running), (m, running), CURLM_INTERNAL_ERROR)                             \
	X(CURLMsg *, curl_multi_info_read, (CURLM * m, int *left), (m, left), NULL)                                                 \
	X(CURLMcode, curl_multi_poll, (CURLM * m, struct curl_waitfd more[], unsigned int n, int ms, int *ready),                   \
	  (m, more, n, ms, ready), CURLM_INTERNAL_ERROR)                                                                            \
	X(CURLMcode, curl_multi_wakeup, (CURLM * m), (m), CURLM_INTERNAL_ERROR)                                                     \
	X(CURLMcode, curl_multi_cleanup, (CURLM * m), (m), CURLM_INTERNAL_ERROR)                                                    \
	X(CURLSH *, curl_share_init, (void), (), NULL)                                                                              \
	X(const char *, curl_share_strerror, (CURLSHcode code), (code), SAID)                                                       \
	X(CURLSHcode, curl_share_cleanup, (CURLSH * s), (s), CURLSHE_INVALID)                                                       \
	X(struct curl_slist *, curl_slist_append, (struct curl_slist * list, const char *text), (list, text), NULL)                 \
	V(curl_slist_free_all, (struct curl_slist * list), (list))                                                                  \
	X(CURLU *, curl_url, (void), (), NULL)                                                                                      \
	X(CURLUcode, curl_url_get, (CURLU_READ * u, CURLUPart part, char **text, unsigned int flags), (u, part, text, flags),       \
	  CURLUE_BAD_HANDLE)                                                                                                        \
	X(CURLUcode, curl_url_set, (CURLU * u, CURLUPart part, const char *text, unsigned int flags), (u, part, text, flags),       \
	  CURLUE_BAD_HANDLE)                                                                                                        \
	V(curl_url_cleanup, (CURLU * u), (u))                                                                                       \
	V(curl_free, (void *p), (p))                                                                                                \
	X(time_t, curl_getdate, (const char *text, const time_t *unused), (text, unused), -1)

#define MEMBER(result, name, params, args, otherwise) result(*name) params;
#define MEMBER_V(name, params, args) void(*name) params;

static struct {
	bool is_open;
	CURLcode (*easy_setopt)(CURL *c, CURLoption option, ...);
	CURLcode (*easy_getinfo)(CURL *c, CURLINFO info, ...);
	CURLSHcode (*share_setopt)(CURLSH *s, CURLSHoption option, ...);
	CURL_CALLS(MEMBER, MEMBER_V)
} lib;

static void *find(void *handle, const char *name, bool *all)
{
	void *at = handle ? dlsym(handle, name) : NULL;

	*all = *all && at;
	return at;
}

static void open_library(void)
{
	void *handle = dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL);
	bool all = true;

#define FIND(result, name, params, args, otherwise) *(void **)&lib.name = find(handle, #name, &all);
#define FIND_V(name, params, args) FIND(void, name, params, args, )
	CURL_CALLS(FIND, FIND_V)
	*(void **)&lib.easy_setopt = find(handle, "curl_easy_setopt", &all);
	*(void **)&lib.easy_getinfo = find(handle, "curl_easy_getinfo", &all);
	*(void **)&lib.share_setopt = find(handle, "curl_share_setopt", &all);
	lib.is_open = all;
	if (!all) {
		const char *why = dlerror();
		log_err(SAID, "why", why ? why : "it lacks a function", NULL);
	}
}

static bool is_open(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, open_library);
	return lib.is_open;
}

#define CALL(result, name, params, args, otherwise)       \
	result name params                                \
	{                                                 \
		return is_open() ? lib.name args : (otherwise); \
	}
#define CALL_V(name, params, args)  \
	void name params            \
	{                           \
		if (is_open())      \
			lib.name args; \
	}
CURL_CALLS(CALL, CALL_V)

/* The third argument is a long, a pointer or a curl_off_t: it is passed on as it came. */
_Static_assert(sizeof(long) == sizeof(void *) && sizeof(curl_off_t) == sizeof(void *), "an argument has one size");

#define CALL_WITH_ONE(result, name, member, type, what_type, otherwise)                   \
	result name(type *handle, what_type what, ...)                                    \
	{                                                                                 \
		va_list ap;                                                               \
		va_start(ap, what);                                                       \
		void *one = va_arg(ap, void *);                                           \
		va_end(ap);                                                               \
		return is_open() ? lib.member(handle, what, one) : (otherwise);           \
	}
CALL_WITH_ONE(CURLcode, curl_easy_setopt, easy_setopt, CURL, CURLoption, CURLE_FAILED_INIT)
CALL_WITH_ONE(CURLcode, curl_easy_getinfo, easy_getinfo, CURL, CURLINFO, CURLE_FAILED_INIT)
CALL_WITH_ONE(CURLSHcode, curl_share_setopt, share_setopt, CURLSH, CURLSHoption, CURLSHE_INVALID)
