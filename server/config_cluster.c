/* config_cluster.c: checks the options of a node of a cluster: names, addresses, and that nothing secret travels in the clear. */
#include "server/config.h"

#include <string.h>

#include "base/num.h"

enum { NAME_MAX_BYTES = 64, PREFIX_MAX_BYTES = 200 };
enum { TTL_MIN_MS = 2000, TTL_MAX_MS = 3600000 };

static const char name_bytes[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";

static bool is_of(struct str s, const char *bytes)
{
	for (size_t i = 0; i < s.n; i++)
		if (!memchr(bytes, s.p[i], strlen(bytes)))
			return false;
	return s.n > 0;
}

/* Divides HOST:PORT or [HOST]:PORT. port_out: NULL: not wanted. */
static bool split_port(struct str text, struct str *host_out, uint64_t *port_out)
{
	const char *colon = text.n ? memrchr(text.p, ':', text.n) : NULL;
	uint64_t port = 0;

	if (!colon || !str_to_u64((struct str){ colon + 1, text.n - (size_t)(colon + 1 - text.p) }, &port) || port < 1 || port > 65535)
		return false;
	*host_out = (struct str){ text.p, (size_t)(colon - text.p) };
	if (port_out)
		*port_out = port;
	if (host_out->n > 2 && host_out->p[0] == '[' && host_out->p[host_out->n - 1] == ']')
		return is_of((struct str){ host_out->p + 1, host_out->n - 2 }, "0123456789abcdefABCDEF:.");
	return host_out->n <= 253 && is_of(*host_out, name_bytes);
}

static bool split_address(struct str text, struct str *host_out)
{
	return split_port(text, host_out, NULL);
}

static bool is_loopback(struct str host)
{
	return str_is(host, "localhost") || str_is(host, "[::1]") || (str_starts(host, "127.") && is_of(host, "0123456789."));
}

bool config_may_send_secret(const struct config *c, struct str url)
{
	struct str host, rest = { url.p + 7, url.n - 7 };

	if (c->insecure_http || str_starts(url, "https://"))
		return true;
	return str_starts(url, "http://") && split_address(rest, &host) && is_loopback(host);
}

static FALLIBLE enum err check_url(const struct config *c, struct str url)
{
	bool secure = str_starts(url, "https://"), plain = str_starts(url, "http://");
	size_t skip = secure ? 8 : 7, end = url.n && url.p[url.n - 1] == '/' ? url.n - 1 : url.n;
	struct str host;

	if ((!secure && !plain) || end <= skip || !split_address((struct str){ url.p + skip, end - skip }, &host))
		return ERR(CONFIG, "cluster: \"%.*s\" is not http://HOST:PORT or https://HOST:PORT", (int)num_min(url.n, 200), url.p);
	if (plain && !is_loopback(host) && !c->insecure_http)
		return ERR(CONFIG, "cluster: \"%.*s\" is beyond loopback: etcd has the cluster's secret, so it needs https:// (or "
			   "--insecure-http)", (int)num_min(url.n, 200), url.p);
	return OK;
}

bool config_is_loopback(const char *address)
{
	struct str host;

	return split_address(str_of(address), &host) && is_loopback(host);
}

static FALLIBLE enum err check_urls(const struct config *c)
{
	for (const char *p = c->cluster;; p++) {
		size_t n = strcspn(p, ",");
		TRY(check_url(c, (struct str){ p, n }));
		p += n;
		if (!*p)
			return OK;
	}
}

static FALLIBLE enum err check_node(const struct config *c)
{
	struct str name = str_of(c->node), host;

	if (name.n > NAME_MAX_BYTES || !is_of(name, name_bytes) || strchr("._-", name.p[0]))
		return ERR(CONFIG, "node: \"%.100s\" is no name of 1 to %d letters, digits, '.', '_' and '-', beginning with one of the "
			   "first two", c->node, NAME_MAX_BYTES);
	if (!split_address(str_of(c->advertise), &host))
		return ERR(CONFIG, "advertise: \"%.200s\" is not HOST:PORT", c->advertise);
	if (!is_loopback(host) && !c->tls_cert && !c->insecure_http)
		return ERR(CONFIG, "advertise: \"%.200s\" is beyond loopback: nodes trust each other by a secret, so it needs --tls-cert "
			   "(or --insecure-http)", c->advertise);
	return OK;
}

/* Can what comes to the advertised address reach this listener? A container's port map, or a relay, may lead to another port. */
static bool listens_for(const char *listen, bool on_loopback)
{
	const char *colon = strrchr(listen, ':'), *digits = colon ? colon + 1 : listen;
	struct str host = colon ? (struct str){ listen, (size_t)(colon - listen) } : STR("127.0.0.1");
	uint64_t own;

	if (str_starts(str_of(listen), "unix:") || !str_to_u64(str_of(digits), &own))
		return false;
	return on_loopback || !is_loopback(host);
}

static FALLIBLE enum err check_listen(const struct config *c)
{
	struct str host;
	uint64_t port;
	bool heard = false;

	(void)split_port(str_of(c->advertise), &host, &port); /* check_node() has */
	for (uint32_t i = 0; i < c->listen.count; i++)
		heard = heard || listens_for(c->listen.items[i], is_loopback(host));
	if (heard)
		return OK;
	return ERR(CONFIG, "advertise: no --listen is for \"%.200s\": the other nodes would find nobody there", c->advertise);
}

bool config_cluster_reaches_workers(const struct config *c)
{
	struct str host = { 0 }, listen = str_of(c->comm_listen);

	(void)split_address(str_of(c->advertise), &host); /* check_node() has */
	return is_loopback(host) || !(is_loopback(listen) || str_is(listen, "lo") || str_is(listen, "::1"));
}

FALLIBLE enum err config_cluster_check(const struct config *c)
{
	struct str prefix = str_of(c->cluster_prefix);

	if (!c->cluster && (c->node || c->advertise || c->cluster_user || c->cluster_cert))
		return ERR(CONFIG, "node, advertise, cluster-user and cluster-cert are for a node of a cluster: --cluster names its etcd");
	if (!c->cluster)
		return OK;
	if (!c->node || !c->advertise)
		return ERR(CONFIG, "cluster: a node also needs --node NAME and --advertise HOST:PORT");
	if (!c->cluster_cert != !c->cluster_key)
		return ERR(CONFIG, "cluster-cert and cluster-key go together");
	if (prefix.n > PREFIX_MAX_BYTES || prefix.p[0] != '/' || !is_of((struct str){ prefix.p + 1, prefix.n - 1 }, name_bytes))
		return ERR(CONFIG, "cluster-prefix: \"%.100s\" is not '/' and a name", c->cluster_prefix);
	if (c->cluster_ttl_ms < TTL_MIN_MS || c->cluster_ttl_ms > TTL_MAX_MS || c->cluster_ttl_ms % 1000)
		return ERR(CONFIG, "cluster-ttl: must be whole seconds, from 2s to 1h");
	TRY(check_node(c));
	TRY(check_urls(c));
	return check_listen(c);
}
