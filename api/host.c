/* host.c: see host.h. An address in the Host header cannot have been rebound: only names can, and only ours are let through. */
#include "api/host.h"

#include <arpa/inet.h>
#include <strings.h>

static bool is_address(struct str host)
{
	unsigned char address[16];
	char text[64] = "";

	if (host.n == 0 || host.n >= sizeof text)
		return false;
	memcpy(text, host.p, host.n);
	text[host.n] = '\0';
	if (text[0] == '[' && text[host.n - 1] == ']') {
		text[host.n - 1] = '\0';
		return inet_pton(AF_INET6, text + 1, address) == 1;
	}
	return inet_pton(AF_INET, text, address) == 1;
}

bool host_ok(struct str host, const char *const *allowed, uint32_t allowed_count)
{
	const char *end = host.n ? memrchr(host.p, ':', host.n) : NULL;

	if (end && !memchr(end, ']', host.n - (size_t)(end - host.p))) {
		for (const char *p = end + 1; p < host.p + host.n; p++)
			if (*p < '0' || *p > '9')
				return false;
		host.n = (size_t)(end - host.p);
	}
	if (is_address(host))
		return true;
	if (host.n == 9 && strncasecmp(host.p, "localhost", 9) == 0)
		return true;
	for (uint32_t i = 0; i < allowed_count; i++)
		if (strlen(allowed[i]) == host.n && strncasecmp(allowed[i], host.p, host.n) == 0)
			return true;
	return false;
}

bool host_is_origin(const char *origin, const char *host)
{
	const char *at = strstr(origin, "://");

	return at && host && strcasecmp(at + 3, host) == 0;
}
