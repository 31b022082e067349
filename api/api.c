/* api.c: see api.h: the token, the listeners, and the order in which things start and end. */
#include <event2/event.h>
#include <fcntl.h>
#include <grp.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "api/answers.h"
#include "api/api_impl.h"
#include "api/listen.h"
#include "api/stream.h"
#include "base/log.h"
#include "base/mem.h"
#include "os/fs.h"
#include "server/config.h"
#include "server/server.h"

enum { TOKEN_BYTES = 24, PEM_MAX = 1 << 20 };

/* Opens the folder of a path; *name_out is the rest. */
static FALLIBLE enum err open_folder(const char *path, const char **name_out, int *fd_out)
{
	CLEANUP(mem_free_ptr) char *folder = mem_strdup(path);
	char *slash = folder ? strrchr(folder, '/') : NULL;

	if (!folder)
		return ERR(NO_MEMORY, "cannot open %s", path);
	*name_out = slash ? path + (slash - folder) + 1 : path;
	if (slash)
		slash[slash == folder ? 1 : 0] = '\0';
	return fs_open_root(slash ? folder : ".", fd_out);
}

static FALLIBLE enum err read_text(const char *path, char **text_out)
{
	CLEANUP(fs_drop) int folder = -1;
	const char *name = NULL;
	void *bytes = NULL;
	uint64_t n = 0;

	TRY(open_folder(path, &name, &folder));
	TRY(fs_read_all(folder, name, PEM_MAX, &bytes, &n));
	char *text = mem_grow(bytes, n + 1, 1);
	if (!text) {
		mem_free(bytes);
		return ERR(NO_MEMORY, "cannot read %s", path);
	}
	text[n] = '\0';
	*text_out = text;
	return OK;
}

static FALLIBLE enum err make_token(const char *path)
{
	CLEANUP(fs_drop) int folder = -1;
	CLEANUP(fs_drop) int fd = -1;
	CLEANUP(buf_free) struct buf text = BUF_INIT(256);
	unsigned char random[TOKEN_BYTES];
	const char *name = NULL;

	if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
		return ERR_SYS(SYSTEM, "cannot make a token");
	for (size_t i = 0; i < sizeof random; i++)
		buf_printf(&text, "%02x", random[i]);
	buf_putc(&text, '\n');
	TRY(buf_status(&text));
	TRY(open_folder(path, &name, &folder));
	TRY(fs_open(folder, name, O_CREAT | O_EXCL | O_WRONLY, 0600, &fd));
	enum err e = fs_pwrite(fd, text.p, text.len, 0, name);
	if (!e)
		e = fs_fsync(fd, name);
	if (e) /* half a token would be refused at every start from here on */
		(void)unlinkat(folder, name, 0);
	return e;
}

FALLIBLE enum err api_reload(struct api *a)
{
	CLEANUP(mem_free_ptr) char *text = NULL;
	const char *path = a->core->config->token_file;
	enum err e = read_text(path, &text);
	size_t n;

	if (e == ERR_NOT_FOUND) {
		e = make_token(path);
		if (e == ERR_STORAGE_FULL) { /* guard.c asks again when there is space */
			log_err("no token can be made: over TCP nobody is let in", NULL);
			return OK;
		}
		TRY(e);
		e = read_text(path, &text);
	}
	TRY(e);
	n = strcspn(text, " \t\r\n");
	if (n < 16 || n >= API_TOKEN_MAX)
		return ERR(CONFIG, "the token in %s must have 16 to %d characters", path, API_TOKEN_MAX - 1);
	memset(a->token, 0, sizeof a->token);
	memcpy(a->token, text, n);
	return OK;
}

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

static FALLIBLE enum err open_listeners(struct api *a, const struct config *c)
{
	bool tls = c->tls_cert != NULL;

	TRY(check_tls(c));
	if (tls) {
		TRY(read_text(c->tls_cert, &a->tls_cert_pem));
		TRY(read_text(c->tls_key, &a->tls_key_pem));
	}
	for (uint32_t i = 0; i < c->listen.count; i++) {
		TRY(listen_open(c->listen.items[i], tls, c->insecure_http, a->group, &a->listeners[i]));
		a->listener_count++;
	}
	return OK;
}

static FALLIBLE enum err start(struct api *a)
{
	const struct config *c = a->core->config;
	struct http_options o = { .api = a, .core = a->core, .listeners = a->listeners };

	TRY(find_group(a, c->allow_group));
	TRY(api_reload(a));
	TRY(open_listeners(a, c));
	TRY(streams_new(a, &a->streams));
	TRY(answers_new(&a->answers));
	o.listener_count = a->listener_count;
	o.tls_cert_pem = a->tls_cert_pem;
	o.tls_key_pem = a->tls_key_pem;
	return http_start(a->core->base, &o, &a->http);
}

FALLIBLE enum err api_start(struct server *core, struct api **out)
{
	struct api *a = mem_zalloc(1, sizeof *a);

	if (!a)
		return ERR(NO_MEMORY, "cannot start the API");
	a->core = core;
	a->allowed_hosts = (const char *const *)core->config->allowed_host.items;
	a->allowed_host_count = core->config->allowed_host.count;
	a->web_root = core->config->web_root;
	enum err e = start(a);
	if (e) {
		struct err_info why = *err_last();
		api_free(a);
		err_restore(&why);
		return e;
	}
	log_debug("http", "library", MHD_get_version(), NULL);
	*out = a;
	return OK;
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

struct http *api_http(struct api *a)
{
	return a->http;
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
	answers_free(a->answers);
	streams_free(a->streams);
	mem_free(a->tls_cert_pem);
	mem_free(a->tls_key_pem);
	memset(a->token, 0, sizeof a->token);
	mem_free(a);
}
