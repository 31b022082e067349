/* s3_credentials.c: see s3_credentials.h. When keys are fetched; s3_source.c knows from where. */
#include "store/s3_credentials.h"

#include <pthread.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/num.h"
#include "store/s3_source.h"

enum {
	MARGIN_MS = 300000,            /* so long before they expire, one thread fetches new ones */
	AGAIN_MS = 1000,               /* and not more often than this, when that failed or they were refused */
};

struct s3_credentials {
	struct s3_source *source;
	pthread_mutex_t lock;
	pthread_cond_t fetched;
	struct s3_keys keys;           /* all below: under the lock */
	int64_t expires_ms;            /* by the wall clock, as its source says; 0: never */
	int64_t fetched_ms;            /* monotone; 0: not yet */
	bool has_keys, is_fetching, is_refused;
	struct err_info failure;       /* of the last fetch, if it failed */
};

FALLIBLE enum err s3_credentials_new(const struct s3_config *config, const char *region, struct s3_http *http, struct s3_credentials **out)
{
	struct s3_credentials *c = mem_zalloc(1, sizeof *c);
	pthread_condattr_t attr;

	NEED(c, "cannot use a storage");
	pthread_mutex_init(&c->lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&c->fetched, &attr);
	pthread_condattr_destroy(&attr);
	enum err e = s3_source_new(config, region, http, &c->source);
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		s3_credentials_free(c);
		return e;
	}
	*out = c;
	return OK;
}

void s3_credentials_free(struct s3_credentials *c)
{
	if (!c)
		return;
	s3_source_free(c->source);
	pthread_cond_destroy(&c->fetched);
	pthread_mutex_destroy(&c->lock);
	explicit_bzero(&c->keys, sizeof c->keys);
	mem_free(c);
}

/* Called and left with the lock held; without it meanwhile. */
static void fetch(struct s3_credentials *c, int64_t deadline_ms)
{
	struct s3_keys keys = { 0 };
	int64_t expires_ms = 0;

	c->is_fetching = true;
	pthread_mutex_unlock(&c->lock);
	enum err e = s3_source_fetch(c->source, deadline_ms, &keys, &expires_ms);
	pthread_mutex_lock(&c->lock);
	if (e) {
		c->failure = *err_last();
	} else {
		c->keys = keys;
		c->expires_ms = expires_ms;
		c->has_keys = true;
		c->failure.code = OK;
	}
	c->is_refused = false;
	c->is_fetching = false;
	c->fetched_ms = clock_mono_ms();
	pthread_cond_broadcast(&c->fetched);
	explicit_bzero(&keys, sizeof keys);
}

FALLIBLE enum err s3_credentials_get(struct s3_credentials *c, int64_t deadline_ms, struct s3_keys *out)
{
	enum err e = OK;

	pthread_mutex_lock(&c->lock);
	for (int waited = 0;;) {
		int64_t left = c->expires_ms ? c->expires_ms - clock_wall_ms() : INT64_MAX;
		bool is_usable = c->has_keys && left > 0, is_recent = c->fetched_ms && clock_mono_ms() - c->fetched_ms < AGAIN_MS;
		bool wants = !is_usable || (left < MARGIN_MS && !is_recent) || c->is_refused;
		if (wants && !c->is_fetching && (is_usable || !is_recent)) {
			fetch(c, deadline_ms);
			continue;
		}
		if (is_usable) {
			*out = c->keys;
			break;
		}
		if (!c->is_fetching) {
			err_restore(&c->failure);
			e = c->failure.code ? c->failure.code : ERR(FORBIDDEN, "the credentials for the object storage have expired");
			break;
		}
		if (waited) {
			e = ERR(STORAGE_STALLED, "the credentials for the object storage could not be fetched in time");
			break;
		}
		struct timespec until = clock_mono_in((int64_t)num_max(1, (uint64_t)(deadline_ms - clock_mono_ms())));
		waited = pthread_cond_timedwait(&c->fetched, &c->lock, &until);
	}
	pthread_mutex_unlock(&c->lock);
	return e;
}

bool s3_credentials_renew(struct s3_credentials *c, const struct s3_keys *refused)
{
	bool is_newer;

	pthread_mutex_lock(&c->lock);
	is_newer = strcmp(c->keys.access, refused->access) != 0 || strcmp(c->keys.secret, refused->secret) != 0 ||
		   strcmp(c->keys.token, refused->token) != 0;
	if (!is_newer && clock_mono_ms() - c->fetched_ms >= AGAIN_MS)
		is_newer = c->is_refused = true;
	pthread_mutex_unlock(&c->lock);
	return is_newer;
}
