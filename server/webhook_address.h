/* webhook_address.h: the addresses that webhooks may be sent to.
 *
 * Whoever chooses a URL chooses whom dcpd's host talks to: without this check a webhook would reach what only this host or its network may
 * reach (a metadata service, a daemon on loopback). The address that is connected to is checked, after names are resolved: a name that
 * resolves to another address later changes nothing. */
#pragma once
#include <sys/socket.h>
#include "base/err.h"
#include "base/str.h"

struct webhook_net {
	unsigned char address[16];     /* an IPv4 address is mapped: ::ffff:a.b.c.d */
	unsigned bits;                 /* of the 128 */
};

/* Parses "10.0.0.0/8", "fd00::/8" or a single address. ERR_CONFIG says what is wrong. */
FALLIBLE enum err webhook_address_parse(const char *text, struct webhook_net *out);
/* Is the address public, or in one of the networks that are allowed? What is neither IPv4 nor IPv6 is not. */
bool webhook_address_ok(const struct sockaddr *address, const struct webhook_net *allowed, size_t count);
