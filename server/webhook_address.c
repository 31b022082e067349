/* webhook_address.c: see webhook_address.h. All is compared as IPv6: IPv4 networks are networks below ::ffff:0:0/96, as in RFC 4291. */
#include "server/webhook_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Networks that are not public: IANA's special-purpose registries (RFC 6890 and what has been added), and multicast. */
static const char *const closed[] = {
	"0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24",
	"192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
	"::/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16",
	"fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8",
};

static const unsigned char mapped[12] = { [10] = 0xff, [11] = 0xff };

FALLIBLE enum err webhook_address_parse(const char *text, struct webhook_net *out)
{
	char address[INET6_ADDRSTRLEN + 1];
	size_t n = strcspn(text, "/");
	uint64_t bits = 0;

	*out = (struct webhook_net){ 0 };
	if (n >= sizeof address)
		return ERR(CONFIG, "\"%.64s\" is no network, such as 10.0.0.0/8", text);
	memcpy(address, text, n);
	address[n] = '\0';
	bool is_v4 = inet_pton(AF_INET, address, out->address + 12) == 1;
	if (is_v4)
		memcpy(out->address, mapped, sizeof mapped);
	else if (inet_pton(AF_INET6, address, out->address) != 1)
		return ERR(CONFIG, "\"%.64s\" is no network, such as 10.0.0.0/8", text);
	unsigned most = is_v4 ? 32 : 128;
	if (!text[n])
		bits = most;
	else if (!str_to_u64(str_of(text + n + 1), &bits) || bits > most)
		return ERR(CONFIG, "\"%.64s\": behind the slash stands a number from 0 to %u", text, most);
	out->bits = (unsigned)bits + (is_v4 ? 96 : 0);
	return OK;
}

static bool is_inside(const unsigned char address[16], const struct webhook_net *net)
{
	unsigned whole = net->bits / 8, rest = net->bits % 8;

	if (memcmp(address, net->address, whole) != 0)
		return false;
	return rest == 0 || (address[whole] ^ net->address[whole]) >> (8 - rest) == 0;
}

static bool is_closed(const unsigned char address[16])
{
	for (size_t i = 0; i < sizeof closed / sizeof *closed; i++) {
		struct webhook_net net;
		must(webhook_address_parse(closed[i], &net) == OK);
		if (is_inside(address, &net))
			return true;
	}
	return false;
}

bool webhook_address_ok(const struct sockaddr *address, const struct webhook_net *allowed, size_t count)
{
	unsigned char bytes[16];
	bool is_v6 = address->sa_family == AF_INET6;

	if (is_v6) {
		memcpy(bytes, &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr, sizeof bytes);
	} else if (address->sa_family == AF_INET) {
		memcpy(bytes, mapped, sizeof mapped);
		memcpy(bytes + 12, &((const struct sockaddr_in *)(const void *)address)->sin_addr, 4);
	} else {
		return false;
	}
	for (size_t i = 0; i < count; i++)
		if (is_inside(bytes, &allowed[i]))
			return true;
	/* A mapped address reaches an IPv4 host by a form that a filter in front may not know: only where it is allowed. */
	if (is_v6 && memcmp(bytes, mapped, sizeof mapped) == 0)
		return false;
	return !is_closed(bytes);
}
