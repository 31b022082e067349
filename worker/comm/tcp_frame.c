/* tcp_frame.c: see tcp_frame.h. One place turns bytes into structs, so that one fuzzer can reach all of it. */
#include "comm/tcp_frame.h"

#include <netinet/in.h>
#include <sodium.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY
#if defined(__x86_64__)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include "base/reader.h"

static const unsigned char frame_magic[4] = { 'D', 'C', 'P', 'C' };
static const unsigned char hello_magic[4] = { 'D', 'C', 'P', 'H' };
static const unsigned char card_magic[4] = { 'D', 'C', 'P', 'A' };

enum { CHECKED = TCP_HEAD_BYTES - 8, RESERVED_WORDS = 3 };

uint64_t tcp_check(const void *p, size_t n)
{
	return XXH3_64bits(p, n);
}

/* ---- a writer of little-endian fields ---- */

struct out {
	unsigned char *p;
};

static void put(struct out *o, uint64_t v, size_t n)
{
	for (size_t i = 0; i < n; i++)
		*o->p++ = (unsigned char)(v >> (8 * i));
}

static void put_bytes(struct out *o, const void *p, size_t n)
{
	memcpy(o->p, p, n);
	o->p += n;
}

/* ---- frames ---- */

_Static_assert(sizeof(struct comm_call) == 32, "a call has no holes");

void tcp_head_put(const struct tcp_identity *id, const struct tcp_head *h, unsigned char out[TCP_HEAD_BYTES])
{
	struct out o = { out };

	put_bytes(&o, frame_magic, sizeof frame_magic);
	put(&o, TCP_VERSION, 2);
	put(&o, h->type, 2);
	put(&o, id->group_id, 8);
	put(&o, id->generation, 8);
	put(&o, h->channel, 8);
	put(&o, h->call.number, 8);
	put(&o, h->call.bytes, 8);
	put(&o, h->call.digest, 8);
	put(&o, h->call.root, 4);
	put(&o, h->call.kind, 1);
	put(&o, h->call.dtype, 1);
	put(&o, h->call.op, 1);
	put(&o, h->call.step, 1);
	put(&o, h->stream, 8);
	put(&o, h->offset, 8);
	put(&o, h->length, 4);
	put(&o, 0, 4);
	for (int i = 0; i < RESERVED_WORDS; i++)
		put(&o, 0, 8);
	put(&o, h->check, 8);
	put(&o, tcp_check(out, CHECKED), 8);
}

static FALLIBLE enum err check_kind(const struct tcp_head *h)
{
	uint32_t max = h->type == TCP_DATA ? TCP_BODY_MAX : h->type == TCP_ABORT ? TCP_NOTE_MAX : 0;

	if (h->type == 0 || h->type >= TCP_TYPES)
		return ERR(COMM_PROTOCOL, "a frame of the unknown type %u", h->type);
	if (h->length > max)
		return ERR(COMM_PROTOCOL, "a frame of type %u and %u bytes: at most %u are allowed", h->type, h->length, max);
	return OK;
}

static FALLIBLE enum err check_identity(const struct tcp_identity *want, uint64_t group_id, uint64_t generation)
{
	if (group_id != want->group_id)
		return ERR(COMM_PROTOCOL, "a message of group %#jx; this is %#jx", (uintmax_t)group_id, (uintmax_t)want->group_id);
	if (generation != want->generation)
		return ERR(COMM_PROTOCOL, "a message of generation %ju; this is %ju", (uintmax_t)generation, (uintmax_t)want->generation);
	return OK;
}

enum err tcp_head_get(const struct tcp_identity *id, const unsigned char in[TCP_HEAD_BYTES], struct tcp_head *out)
{
	struct reader i = reader_of(in, TCP_HEAD_BYTES);
	const unsigned char *magic = reader_take(&i, sizeof frame_magic);
	struct tcp_head h = { 0 };

	if (memcmp(magic, frame_magic, sizeof frame_magic) != 0)
		return ERR(COMM_PROTOCOL, "no frame begins here");
	uint64_t version = reader_u16(&i), type = reader_u16(&i);
	if (version != TCP_VERSION)
		return ERR(COMM_PROTOCOL, "a frame of version %ju; this is %d", (uintmax_t)version, TCP_VERSION);
	struct reader end = reader_of(in + CHECKED, 8);
	if (reader_u64(&end) != tcp_check(in, CHECKED))
		return ERR(COMM_PROTOCOL, "the head of a frame is damaged: its checksum differs");
	uint64_t group_id = reader_u64(&i), generation = reader_u64(&i);
	h.type = type > UINT8_MAX ? 0 : (uint8_t)type;
	h.channel = reader_u64(&i);
	h.call.number = reader_u64(&i);
	h.call.bytes = reader_u64(&i);
	h.call.digest = reader_u64(&i);
	h.call.root = reader_u32(&i);
	h.call.kind = reader_u8(&i);
	h.call.dtype = reader_u8(&i);
	h.call.op = reader_u8(&i);
	h.call.step = reader_u8(&i);
	h.stream = reader_u64(&i);
	h.offset = reader_u64(&i);
	h.length = reader_u32(&i);
	uint64_t reserved = reader_u32(&i);
	for (int k = 0; k < RESERVED_WORDS; k++)
		reserved |= reader_u64(&i);
	if (reserved != 0)
		return ERR(COMM_PROTOCOL, "a reserved field of a frame is in use");
	h.check = reader_u64(&i);
	TRY(check_identity(id, group_id, generation));
	TRY(check_kind(&h));
	*out = h;
	return OK;
}

/* ---- why the group failed ---- */

static void put_text(struct out *o, const char *z, size_t max)
{
	size_t n = strnlen(z, max - 1);

	put(o, n, 2);
	put_bytes(o, z, n);
}

uint32_t tcp_note_put(const struct err_info *f, unsigned char out[TCP_NOTE_MAX])
{
	struct out o = { out };

	put(&o, f->code, 4);
	put(&o, (uint64_t)f->rank, 8);
	put(&o, (uint64_t)f->offset, 8);
	put_text(&o, f->text, ERR_TEXT_MAX);
	put_text(&o, f->fqn, ERR_FQN_MAX);
	put_text(&o, f->file, ERR_FILE_MAX);
	put_text(&o, f->expected, ERR_VALUE_MAX);
	put_text(&o, f->actual, ERR_VALUE_MAX);
	return (uint32_t)(o.p - out);
}

/* Text of others goes to logs and clients: one line of printable characters. */
static void get_text(struct reader *i, char *z, size_t max)
{
	uint16_t n = reader_u16(i);

	i->failed = i->failed || n >= max;
	struct str text = reader_str(i, n);
	for (size_t k = 0; k < text.n; k++)
		z[k] = (unsigned char)text.p[k] < ' ' || text.p[k] == 0x7f ? ' ' : text.p[k];
	z[text.n] = '\0';
}

enum err tcp_note_get(const unsigned char *p, uint32_t n, struct err_info *out)
{
	struct err_info f = { .place = "another member" };
	struct reader i = reader_of(p, n);
	uint32_t code = reader_u32(&i);

	if (code == OK || code >= ERR_COUNT)
		return ERR(COMM_PROTOCOL, "an error note with the unknown code %u", code);
	f.code = (enum err)code;
	f.rank = (int64_t)reader_u64(&i);
	f.offset = (int64_t)reader_u64(&i);
	get_text(&i, f.text, sizeof f.text);
	get_text(&i, f.fqn, sizeof f.fqn);
	get_text(&i, f.file, sizeof f.file);
	get_text(&i, f.expected, sizeof f.expected);
	get_text(&i, f.actual, sizeof f.actual);
	if (i.failed)
		return ERR(COMM_PROTOCOL, "an error note of %u bytes is cut off at byte %ju, or has too long a text", n, (uintmax_t)i.at);
	if (reader_left(&i) || f.rank < -1 || f.offset < -1)
		return ERR(COMM_PROTOCOL, "an error note with values that cannot be");
	*out = f;
	return OK;
}

/* ---- the greeting ---- */

void tcp_hello_put(const struct tcp_identity *id, const struct tcp_hello *h, unsigned char out[TCP_HELLO_BYTES])
{
	struct out o = { out };

	put_bytes(&o, hello_magic, sizeof hello_magic);
	put(&o, TCP_VERSION, 4);
	put(&o, id->group_id, 8);
	put(&o, id->generation, 8);
	put(&o, h->rank, 4);
	put(&o, h->link, 4);
	put_bytes(&o, h->nonce, TCP_NONCE_BYTES);
}

enum err tcp_hello_get(const struct tcp_identity *id, const unsigned char in[TCP_HELLO_BYTES], struct tcp_hello *out)
{
	struct reader i = reader_of(in, TCP_HELLO_BYTES);
	const unsigned char *magic = reader_take(&i, sizeof hello_magic);
	struct tcp_hello h;

	if (memcmp(magic, hello_magic, sizeof hello_magic) != 0)
		return ERR(COMM_PROTOCOL, "a connection that does not begin with a hello");
	if (reader_u32(&i) != TCP_VERSION)
		return ERR(COMM_PROTOCOL, "a hello of another version");
	uint64_t group_id = reader_u64(&i), generation = reader_u64(&i);
	TRY(check_identity(id, group_id, generation));
	h.rank = reader_u32(&i);
	h.link = reader_u32(&i);
	reader_copy(&i, h.nonce, TCP_NONCE_BYTES);
	*out = h;
	return OK;
}

enum { MAC_INPUT = 8 + TCP_HELLO_BYTES + TCP_NONCE_BYTES };
_Static_assert(crypto_auth_KEYBYTES == COMM_SECRET_BYTES && crypto_auth_BYTES == TCP_MAC_BYTES, "sizes of crypto_auth");

static void mac_input(const struct tcp_greeting *g, enum tcp_step step, unsigned char text[MAC_INPUT])
{
	struct out o = { text };

	put(&o, step, 4);
	put(&o, g->listener, 4);
	put_bytes(&o, g->hello, TCP_HELLO_BYTES);
	put_bytes(&o, g->nonce, TCP_NONCE_BYTES);
}

void tcp_mac(const unsigned char secret[COMM_SECRET_BYTES], const struct tcp_greeting *g, enum tcp_step step,
	     unsigned char out[TCP_MAC_BYTES])
{
	unsigned char text[MAC_INPUT];

	mac_input(g, step, text);
	crypto_auth(out, text, sizeof text, secret);
}

bool tcp_mac_ok(const unsigned char secret[COMM_SECRET_BYTES], const struct tcp_greeting *g, enum tcp_step step,
		const unsigned char mac[TCP_MAC_BYTES])
{
	unsigned char text[MAC_INPUT];

	mac_input(g, step, text);
	return crypto_auth_verify(mac, text, sizeof text, secret) == 0;
}

/* ---- the card ---- */

void tcp_card_put(const struct tcp_card *card, unsigned char out[COMM_RENDEZVOUS_BYTES])
{
	struct out o = { out };

	memset(out, 0, COMM_RENDEZVOUS_BYTES);
	put_bytes(&o, card_magic, sizeof card_magic);
	put(&o, TCP_VERSION, 2);
	put(&o, card->failed, 2);
	put(&o, card->connections, 4);
	if (card->at.ss_family == AF_INET) {
		const struct sockaddr_in *a = (const void *)&card->at;
		put(&o, 4, 2);
		put(&o, ntohs(a->sin_port), 2);
		put_bytes(&o, &a->sin_addr, 4);
	} else if (card->at.ss_family == AF_INET6) {
		const struct sockaddr_in6 *a = (const void *)&card->at;
		put(&o, 6, 2);
		put(&o, ntohs(a->sin6_port), 2);
		put_bytes(&o, &a->sin6_addr, 16);
	}
}

static FALLIBLE enum err get_address(struct reader *i, struct sockaddr_storage *out)
{
	uint64_t family = reader_u16(i), port = reader_u16(i);
	struct sockaddr_in a4 = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
	struct sockaddr_in6 a6 = { .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port) };

	if ((family != 4 && family != 6) || port == 0)
		return ERR(COMM_PROTOCOL, "a member's card has no address");
	memset(out, 0, sizeof *out);
	if (family == 4) {
		reader_copy(i, &a4.sin_addr, 4);
		memcpy(out, &a4, sizeof a4);
	} else {
		reader_copy(i, &a6.sin6_addr, 16);
		memcpy(out, &a6, sizeof a6);
	}
	return OK;
}

enum err tcp_card_get(const unsigned char in[COMM_RENDEZVOUS_BYTES], struct tcp_card *out)
{
	struct reader i = reader_of(in, COMM_RENDEZVOUS_BYTES);
	const unsigned char *magic = reader_take(&i, sizeof card_magic);
	struct tcp_card card = { 0 };

	if (memcmp(magic, card_magic, sizeof card_magic) != 0)
		return ERR(COMM_PROTOCOL, "a member's card is none of the tcp back end");
	if (reader_u16(&i) != TCP_VERSION)
		return ERR(COMM_PROTOCOL, "a member's card is of another version");
	card.failed = reader_u16(&i) != 0;
	card.connections = reader_u32(&i);
	if (!card.failed) {
		if (card.connections == 0 || card.connections > TCP_LINKS_MAX)
			return ERR(COMM_PROTOCOL, "a member's card asks for %u connections", card.connections);
		TRY(get_address(&i, &card.at));
	}
	*out = card;
	return OK;
}
