/* test_tcp_frame.c: frames, error notes, greetings and cards of the tcp back end; what is no such thing is refused. */
#include "lib/t.h"

#include <netinet/in.h>
#include <string.h>

#include "comm/tcp_frame.h"

static const struct tcp_identity id = { 0x1234567890abcdef, 42 };
static const struct tcp_head sample = {
	.type = TCP_DATA, .channel = 77, .stream = 5, .offset = 1ULL << 40, .length = 1000, .check = 0xfeedface,
	.call = { .number = 9, .bytes = 1ULL << 41, .digest = 3, .root = 2, .kind = COMM_BROADCAST, .dtype = 4, .op = 1, .step = 6 },
};

static void test_frame(void **state)
{
	unsigned char raw[TCP_HEAD_BYTES], bad[TCP_HEAD_BYTES];
	struct tcp_head h;

	(void)state;
	tcp_head_put(&id, &sample, raw);
	T_OK(tcp_head_get(&id, raw, &h));
	assert_memory_equal(&h.call, &sample.call, sizeof h.call);
	assert_true(h.type == TCP_DATA && h.channel == 77 && h.stream == 5 && h.offset == 1ULL << 40 && h.length == 1000 &&
		    h.check == 0xfeedface);
	/* No bit can be altered. */
	for (size_t i = 0; i < sizeof raw * 8; i++) {
		memcpy(bad, raw, sizeof raw);
		bad[i / 8] ^= (unsigned char)(1 << (i % 8));
		T_ERR(COMM_PROTOCOL, tcp_head_get(&id, bad, &h));
	}
}

static void refuse(struct tcp_identity other, struct tcp_head h, const char *why)
{
	unsigned char raw[TCP_HEAD_BYTES];
	struct tcp_head out;

	tcp_head_put(&other, &h, raw);
	T_ERR(COMM_PROTOCOL, tcp_head_get(&id, raw, &out));
	if (!strstr(err_last()->text, why))
		T_FAIL("\"%s\" does not say \"%s\"", err_last()->text, why);
}

static void test_frame_refused(void **state)
{
	struct tcp_head h = sample;

	(void)state;
	refuse((struct tcp_identity){ id.group_id + 1, id.generation }, sample, "of group");
	refuse((struct tcp_identity){ id.group_id, id.generation - 1 }, sample, "of generation 41");
	h.length = TCP_BODY_MAX + 1;
	refuse(id, h, "at most");
	h = sample;
	h.type = TCP_TYPES;
	refuse(id, h, "unknown type");
	h.type = 0;
	refuse(id, h, "unknown type");
	h.type = TCP_STATE;
	refuse(id, h, "at most 0");
	h.type = TCP_ABORT;
	h.length = TCP_NOTE_MAX + 1;
	refuse(id, h, "at most");
}

static void test_note(void **state)
{
	struct err_info f = { .code = ERR_PEER_LOST, .rank = 3, .offset = -1, .text = "it went\n away", .fqn = "model.w", .file = "f",
			      .expected = "1", .actual = "2" }, back;
	unsigned char raw[TCP_NOTE_MAX];

	(void)state;
	uint32_t n = tcp_note_put(&f, raw);
	T_OK(tcp_note_get(raw, n, &back));
	assert_true(back.code == ERR_PEER_LOST && back.rank == 3 && back.offset == -1);
	assert_string_equal(back.text, "it went  away"); /* one line */
	assert_string_equal(back.fqn, "model.w");
	assert_string_equal(back.actual, "2");
	for (uint32_t k = 0; k < n; k++)
		T_ERR(COMM_PROTOCOL, tcp_note_get(raw, k, &back));
	raw[0] = 0;
	T_ERR(COMM_PROTOCOL, tcp_note_get(raw, n, &back));
	raw[1] = 0xff;
	T_ERR(COMM_PROTOCOL, tcp_note_get(raw, n, &back));
	/* The longest fits. */
	memset(f.text, 'x', sizeof f.text);
	memset(f.fqn, 'x', sizeof f.fqn);
	memset(f.file, 'x', sizeof f.file);
	memset(f.expected, 'x', sizeof f.expected);
	memset(f.actual, 'x', sizeof f.actual);
	n = tcp_note_put(&f, raw);
	assert_true(n < TCP_NOTE_MAX);
	T_OK(tcp_note_get(raw, n, &back));
	assert_int_equal(strlen(back.text), ERR_TEXT_MAX - 1);
}

static void test_greeting(void **state)
{
	static const unsigned char secret[COMM_SECRET_BYTES] = "a", other[COMM_SECRET_BYTES] = "b";
	struct tcp_greeting g = { .listener = 1 };
	struct tcp_hello h = { .rank = 3, .link = 1 }, back;
	unsigned char mac[TCP_MAC_BYTES];

	(void)state;
	tcp_hello_put(&id, &h, g.hello);
	T_OK(tcp_hello_get(&id, g.hello, &back));
	assert_true(back.rank == 3 && back.link == 1);
	T_ERR(COMM_PROTOCOL, tcp_hello_get(&(struct tcp_identity){ 1, 42 }, g.hello, &back));
	tcp_mac(secret, &g, TCP_CHALLENGE, mac);
	assert_true(tcp_mac_ok(secret, &g, TCP_CHALLENGE, mac));
	assert_false(tcp_mac_ok(other, &g, TCP_CHALLENGE, mac));
	/* One step's MAC is not another's, nor another listener's, nor of another nonce. */
	assert_false(tcp_mac_ok(secret, &g, TCP_PROOF, mac));
	g.listener = 2;
	assert_false(tcp_mac_ok(secret, &g, TCP_CHALLENGE, mac));
	g.listener = 1;
	g.nonce[31] = 1;
	assert_false(tcp_mac_ok(secret, &g, TCP_CHALLENGE, mac));
	g.hello[0] ^= 1;
	T_ERR(COMM_PROTOCOL, tcp_hello_get(&id, g.hello, &back));
}

static void test_card(void **state)
{
	struct sockaddr_in a4 = { .sin_family = AF_INET, .sin_port = htons(4711), .sin_addr.s_addr = htonl(0x7f000001) };
	struct sockaddr_in6 a6 = { .sin6_family = AF_INET6, .sin6_port = htons(4712), .sin6_addr = in6addr_loopback };
	struct tcp_card card = { .connections = 2 }, back;
	unsigned char raw[COMM_RENDEZVOUS_BYTES];

	(void)state;
	memcpy(&card.at, &a4, sizeof a4);
	tcp_card_put(&card, raw);
	T_OK(tcp_card_get(raw, &back));
	assert_memory_equal(&back.at, &card.at, sizeof card.at);
	assert_int_equal(back.connections, 2);
	memcpy(&card.at, &a6, sizeof a6);
	tcp_card_put(&card, raw);
	T_OK(tcp_card_get(raw, &back));
	assert_memory_equal(&back.at, &card.at, sizeof card.at);
	card.connections = TCP_LINKS_MAX + 1;
	tcp_card_put(&card, raw);
	T_ERR(COMM_PROTOCOL, tcp_card_get(raw, &back));
	memset(raw, 0, sizeof raw);
	T_ERR(COMM_PROTOCOL, tcp_card_get(raw, &back));
	card = (struct tcp_card){ .failed = true };
	tcp_card_put(&card, raw);
	T_OK(tcp_card_get(raw, &back));
	assert_true(back.failed);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_frame), cmocka_unit_test(test_frame_refused), cmocka_unit_test(test_note),
		cmocka_unit_test(test_greeting), cmocka_unit_test(test_card),
	};
	return cmocka_run_group_tests_name("tcp_frame", tests, NULL, NULL);
}
