/* log.h: one line per event, `key value` pairs, to stderr. Only main programs and their event handlers log;
 * library code returns errors. Levels: error (someone must act), warn (we went on), info (changes of state), debug.
 *
 *     log_info("job started", "job", id, "kind", kind, NULL);
 *     log_err("job failed", "job", id, NULL);           adds what err_last() knows
 */
#pragma once
#include <stdbool.h>

enum log_level { LOG_LEVEL_ERROR, LOG_LEVEL_WARN, LOG_LEVEL_INFO, LOG_LEVEL_DEBUG };

void log_init(const char *role, bool json, enum log_level level); /* role: "dcpd", "worker 3" … is copied */
/* Pairs of const char *key, const char *value up to a NULL key. Values are escaped; a pair whose value is NULL is left out. */
void log_event(enum log_level level, const char *event, ...) __attribute__((sentinel));
void log_err(const char *event, ...) __attribute__((sentinel));
#define log_info(...) log_event(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_warn(...) log_event(LOG_LEVEL_WARN, __VA_ARGS__)
#define log_debug(...) log_event(LOG_LEVEL_DEBUG, __VA_ARGS__)
