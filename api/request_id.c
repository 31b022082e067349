/* request_id.c: see request_id.h. Ids are a counter's values through a bijection (SplitMix64's), so that two are never the same, and cost
 * next to nothing: an id is made for each poll of a job. */
#include "api/request_id.h"

#include <sodium.h>

#include "api/api_impl.h"

uint64_t request_id_seed(void)
{
	uint64_t seed;

	randombytes_buf(&seed, sizeof seed);
	return seed;
}

static uint64_t mixed(uint64_t n)
{
	n = (n ^ n >> 30) * 0xbf58476d1ce4e5b9;
	n = (n ^ n >> 27) * 0x94d049bb133111eb;
	return n ^ n >> 31;
}

static bool is_plain(const char *id, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (id[i] <= ' ' || id[i] >= 0x7f)
			return false;
	return n > 0 && n <= REQUEST_ID_MAX;
}

void request_id_take(struct req *r)
{
	const char *sent = req_head(r, REQUEST_ID_HEAD);
	size_t n = sent ? strlen(sent) : 0;
	uint64_t own;

	r->id_is_sent = is_plain(sent, n);
	if (r->id_is_sent) {
		memcpy(r->id, sent, n + 1);
		return;
	}
	own = mixed(r->api->next_id++);
	for (int i = 0; i < REQUEST_ID_OWN; i++)
		r->id[i] = "0123456789abcdef"[own >> (60 - 4 * i) & 15];
}
