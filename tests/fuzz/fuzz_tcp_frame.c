/* fuzz_tcp_frame.c: everything of the tcp back end that reads bytes of others. The first byte chooses; checksums are put right, so that
 * the fuzzer gets behind them. What is accepted must survive being written and read again. */
#include <string.h>

#include "comm/tcp_frame.h"

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t n);

static const struct tcp_identity id = { 0x0807060504030201, 7 };

static void frame(const unsigned char *data, size_t n)
{
	unsigned char raw[TCP_HEAD_BYTES] = { 0 }, again[TCP_HEAD_BYTES];
	struct tcp_head h, back;

	memcpy(raw, data, n < sizeof raw ? n : sizeof raw);
	uint64_t check = tcp_check(raw, sizeof raw - 8);
	for (int i = 0; i < 8; i++)
		raw[sizeof raw - 8 + i] = (unsigned char)(check >> (8 * i));
	if (tcp_head_get(&id, raw, &h))
		return;
	must(h.type > 0 && h.type < TCP_TYPES && h.length <= TCP_BODY_MAX);
	tcp_head_put(&id, &h, again);
	must(memcmp(raw, again, sizeof raw) == 0 && tcp_head_get(&id, again, &back) == OK);
}

static void note(const unsigned char *data, size_t n)
{
	unsigned char room[TCP_NOTE_MAX];
	struct err_info f, back;

	if (n > TCP_NOTE_MAX || tcp_note_get(data, (uint32_t)n, &f))
		return;
	must(f.code > OK && f.code < ERR_COUNT && f.rank >= -1);
	must(tcp_note_get(room, tcp_note_put(&f, room), &back) == OK);
	must(back.code == f.code && strcmp(back.text, f.text) == 0 && strcmp(back.fqn, f.fqn) == 0);
}

static void hello(const unsigned char *data, size_t n)
{
	unsigned char raw[TCP_HELLO_BYTES] = { 0 }, again[TCP_HELLO_BYTES];
	struct tcp_hello h;

	memcpy(raw, data, n < sizeof raw ? n : sizeof raw);
	if (tcp_hello_get(&id, raw, &h))
		return;
	tcp_hello_put(&id, &h, again);
	must(memcmp(raw, again, sizeof raw) == 0);
}

static void card(const unsigned char *data, size_t n)
{
	unsigned char raw[COMM_RENDEZVOUS_BYTES] = { 0 }, again[COMM_RENDEZVOUS_BYTES];
	struct tcp_card c, back;

	memcpy(raw, data, n < sizeof raw ? n : sizeof raw);
	if (tcp_card_get(raw, &c))
		return;
	must(c.failed || (c.connections > 0 && c.connections <= TCP_LINKS_MAX));
	tcp_card_put(&c, again);
	must(c.failed || (tcp_card_get(again, &back) == OK && memcmp(&c.at, &back.at, sizeof c.at) == 0));
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t n)
{
	void (*const readers[])(const unsigned char *, size_t) = { frame, note, hello, card };

	if (n)
		readers[data[0] % 4](data + 1, n - 1);
	return 0;
}
