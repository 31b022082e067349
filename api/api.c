/* api.c: see api.h: the token, the listeners, and the order in which things start and end. */
#include <event2/event.h>
#include <grp.h>

#include "api/answers.h"
#include "api/api.h"
#include "api/api_impl.h"
#include "api/assets.h"
#include "api/dispatch.h"
#include "api/listen.h"
#include "api/request_id.h"
#include "api/secrets.h"
#include "api/stream.h"
#include "api/tokens.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/config.h"
#include "server/parts.h"

static FALLIBLE enum err find_group(struct api *a, const char *name)
{
	struct group *g = name ? getgrnam(name) : NULL;

	if (name && !g)
		return ERR(CONFIG, "allow-group: there is no group \"%s\"", name);
	a->has_group = g != NULL;
	a->group = g ? g->gr_gid : (gid_t)-1;
	return OK;
}

static FALLIBLE enum err check_tls(const struct config *c)
{
	if ((c->tls_cert != NULL) != (c->tls_key != NULL))
		return ERR(CONFIG, "tls-cert and tls-key need each other");
	if (c->tls_cert && MHD_is_feature_supported(MHD_FEATURE_TLS) != MHD_YES)
		return ERR(CONFIG, "this libmicrohttpd has no TLS");
	if (c->listen.count > API_LISTENERS_MAX)
		return ERR(CONFIG, "at most %d addresses to listen on", API_LISTENERS_MAX);
	return OK;
}

static FALLIBLE enum err open_listeners(struct api *a, const struct config *c, struct listen_given *given)
{
	bool tls = c->tls_cert != NULL;

	TRY(check_tls(c));
	if (tls) {
		TRY(secrets_text(c->tls_cert, &a->tls_cert_pem));
		TRY(secrets_text(c->tls_key, &a->tls_key_pem));
	}
	for (uint32_t i = 0; i < c->listen.count; i++) {
		struct http_listener *l = &a->listeners[a->listener_count];
		TRY(listen_check(c->listen.items[i], tls, c->insecure_http));
		l->fd = -1;
		a->listener_count++;
		TRY(listen_given_use(given, c->listen.items[i], tls, l));
		if (l->fd < 0)
			TRY(listen_open(c->listen.items[i], tls, c->insecure_http, a->group, l));
	}
	return listen_given_end(given);
}

static FALLIBLE enum err start(struct api *a, struct listen_given *given)
{
	const struct config *c = a->core->config;
	struct http_options o = { .calls = &dispatch_calls, .api = a, .core = a->core, .listeners = a->listeners };

	TRY(find_group(a, c->allow_group));
	TRY(tokens_read(c, &a->tokens));
	TRY(open_listeners(a, c, given));
	TRY(streams_new(a, &a->streams));
	TRY(answers_new(&a->answers));
	TRY(assets_packed_new(&a->packed));
	o.listener_count = a->listener_count;
	o.tls_cert_pem = a->tls_cert_pem;
	o.tls_key_pem = a->tls_key_pem;
	return http_start(a->core->base, &o, &a->http);
}

FALLIBLE enum err api_start(struct server *core, struct listen_given *given, struct api **out)
{
	struct api *a = mem_zalloc(1, sizeof *a);

	NEED(a, "cannot start the API");
	a->core = core;
	a->next_id = request_id_seed();
	a->allowed_hosts = (const char *const *)core->config->allowed_host.items;
	a->allowed_host_count = core->config->allowed_host.count;
	a->web_root = core->config->web_root;
	enum err e = start(a, given);
	if (e) {
		CLEANUP(err_restore) struct err_info why = *err_last();
		api_free(a);
		return e;
	}
	log_debug("http", "library", MHD_get_version(), NULL);
	*out = a;
	return OK;
}

FALLIBLE enum err api_reload(struct api *a)
{
	return tokens_read(a->core->config, &a->tokens);
}

FALLIBLE enum err api_check(const struct config *c)
{
	struct api a = { 0 };

	TRY(find_group(&a, c->allow_group));
	TRY(check_tls(c));
	for (uint32_t i = 0; i < c->listen.count; i++)
		TRY(listen_check(c->listen.items[i], c->tls_cert != NULL, c->insecure_http));
	return OK;
}

const char *api_url(const struct api *a, uint32_t index)
{
	return index < a->listener_count ? a->listeners[index].url : NULL;
}

void api_drain(struct api *a)
{
	streams_drain(a->streams);
	http_drain(a->http);
}

bool api_drained(const struct api *a)
{
	return http_drained(a->http);
}

void api_free(struct api *a)
{
	if (!a)
		return;
	if (a->http)
		api_drain(a);
	/* http_free closes the sockets that it was given; those that it never got are closed here. */
	bool served = a->http && http_listeners(a->http) == a->listener_count;
	http_free(a->http);
	for (uint32_t i = 0; i < a->listener_count; i++) {
		if (served)
			a->listeners[i].fd = -1;
		listen_close(&a->listeners[i]);
	}
	assets_packed_free(a->packed);
	answers_free(a->answers);
	streams_free(a->streams);
	mem_free(a->tls_cert_pem);
	mem_free(a->tls_key_pem);
	tokens_free(a->tokens);
	mem_free(a);
}
