/* tcp_frame.h: the bytes of the tcp back end: frames between members, the greeting of a connection, the card by which a member is
 * found. Pure functions; what they read comes from a network, so nothing is believed.
 *
 *   frame (128 bytes, little endian): magic "DCPC", version u16, type u16, group u64, generation u64, channel u64, the call (32),
 *                                     stream u64, offset u64, length u32, 28 zeros, XXH3 of the body u64, XXH3 of all this u64; the body
 *   greeting: hello (member → the member it connects to), challenge (nonce, MAC), proof (MAC), welcome (MAC)
 *
 * The checksum finds damage; it is no signature. The greeting's MACs over both nonces settle once which peer may send. */
#pragma once
#include <sys/socket.h>
#include "comm/comm_impl.h"

enum {
	TCP_VERSION = 2,
	TCP_HEAD_BYTES = 128,          /* two cache lines: the kernel copies a body whose alignment a head has shifted at a lower rate */
	TCP_BODY_MAX = COMM_BLOCK_MAX,
	TCP_LINKS_MAX = 16,            /* data connections of a pair of members */
	TCP_NOTE_MAX = 4096,           /* body of an ABORT */
	TCP_NONCE_BYTES = 32, TCP_MAC_BYTES = 32,
	TCP_HELLO_BYTES = 64, TCP_CHALLENGE_BYTES = TCP_NONCE_BYTES + TCP_MAC_BYTES,
};

enum tcp_type {
	TCP_DATA = 1,                  /* on data links; the others on link 0, which is always read */
	TCP_STATE,                     /* "I wait in this call, for member `stream`" */
	TCP_ABORT,                     /* the group failed; the body says why */
	TCP_BYE,                       /* closed in order */
	TCP_TYPES
};

struct tcp_identity {
	uint64_t group_id, generation;
};

struct tcp_head {
	uint8_t type;
	uint64_t channel;              /* which of the groups that share the connections; 0: the one that was opened */
	struct comm_call call;
	uint64_t stream, offset;       /* which block or message of the call, and where in it */
	uint32_t length;
	uint64_t check;                /* of the body */
};

uint64_t tcp_check(const void *p, size_t n);
void tcp_head_put(const struct tcp_identity *id, const struct tcp_head *h, unsigned char out[TCP_HEAD_BYTES]);
/* ERR_COMM_PROTOCOL for what is no frame of this group. The body is still to be checked. */
FALLIBLE enum err tcp_head_get(const struct tcp_identity *id, const unsigned char in[TCP_HEAD_BYTES], struct tcp_head *out);

/* The failure in an ABORT. */
uint32_t tcp_note_put(const struct err_info *f, unsigned char out[TCP_NOTE_MAX]);
FALLIBLE enum err tcp_note_get(const unsigned char *p, uint32_t n, struct err_info *out);

struct tcp_hello {
	uint32_t rank, link;           /* who connects, and which of its links this is */
	unsigned char nonce[TCP_NONCE_BYTES];
};
void tcp_hello_put(const struct tcp_identity *id, const struct tcp_hello *h, unsigned char out[TCP_HELLO_BYTES]);
FALLIBLE enum err tcp_hello_get(const struct tcp_identity *id, const unsigned char in[TCP_HELLO_BYTES], struct tcp_hello *out);

/* The MACs of one greeting: each side's is of its own step, so that none can be played back. */
enum tcp_step { TCP_CHALLENGE = 1, TCP_PROOF, TCP_WELCOME };
struct tcp_greeting {
	unsigned char hello[TCP_HELLO_BYTES], nonce[TCP_NONCE_BYTES]; /* as sent; the nonce is the listener's */
	uint32_t listener;             /* its rank */
};
void tcp_mac(const unsigned char secret[COMM_SECRET_BYTES], const struct tcp_greeting *g, enum tcp_step step,
	     unsigned char out[TCP_MAC_BYTES]);
bool tcp_mac_ok(const unsigned char secret[COMM_SECRET_BYTES], const struct tcp_greeting *g, enum tcp_step step,
		const unsigned char mac[TCP_MAC_BYTES]);

struct tcp_card {
	struct sockaddr_storage at;
	uint32_t connections;
	bool failed;                   /* this member cannot be reached; it says so that nobody waits for it */
};
void tcp_card_put(const struct tcp_card *card, unsigned char out[COMM_RENDEZVOUS_BYTES]);
FALLIBLE enum err tcp_card_get(const unsigned char in[COMM_RENDEZVOUS_BYTES], struct tcp_card *out);
