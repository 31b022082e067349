/* tcp_impl.h: what the files of the tcp back end share; nobody else includes it (but its tests).
 *
 *     tcp_frame.c    bytes ↔ structs
 *     tcp_net.c      addresses and sockets
 *     tcp_rendezvous.c     members find and greet each other; strangers are dropped
 *     tcp_link.c     one connection: frames in, straight into their place; frames out, straight from it
 *     tcp_run.c      the loop, deadlines, who is to blame, how all agree on a failure
 *     tcp_block.c    an operation on blocks that stream from member to member
 *     tcp_exchange.c an operation on messages
 *     tcp.c          the back end: which operation a collective is
 *
 * Each pair of members has link 0, for what must always get through (abort, state, bye), and one or more data links. A data link
 * with a frame that nobody here waits for yet is parked: it is not read, and its sender blocks when the kernel's buffers are full.
 * So no memory is needed for what comes early, and a flood ends in the flooder's own socket. */
#pragma once
#include <event2/event.h>
#include "comm/tcp_frame.h"
#include "os/watch.h"

enum { TCP_NOBODY = UINT32_MAX };

struct tcp_mesh;

struct tcp_link {
	struct tcp_mesh *mesh;
	uint32_t peer, index;
	struct watch *watch;           /* owns the socket; NULL: not connected yet, or over */
	bool parked;                   /* a head is in `in` that has no place yet */
	/* in */
	unsigned char head[TCP_HEAD_BYTES];
	uint32_t head_got;
	bool in_body;
	struct tcp_head in;
	unsigned char *body;
	uint32_t body_got;
	int low_water;                 /* bytes from which on the socket is readable; 0: as it was made */
	/* out */
	bool sending;
	unsigned char out_head[TCP_HEAD_BYTES];
	const unsigned char *out_body;
	uint32_t out_bytes, out_sent;  /* of the body; of both */
	void *out_owner;               /* the operation's */
	/* link 0 only: what waits to be sent, and room for a body */
	unsigned char *queue, *note;
	uint32_t queued;
};

struct tcp_peer {
	struct tcp_link *links;        /* 1 + mesh->data_links; NULL: this member itself */
	bool here;                     /* all links are greeted */
	bool left;                     /* said goodbye */
	bool noted;                    /* its ABORT came */
	bool gone;                     /* link 0 is over */
	uint64_t suspect_ns;           /* a data link broke: link 0 should tell why; 0: none */
	uint64_t heard_ns;             /* its latest STATE */
	uint32_t waits_for;
};

/* A collective in progress. */
struct tcp_op {
	struct comm *c;
	struct tcp_group *g;
	/* Returns the buffer for the body of link->in; NULL: no buffer yet. An unexpected frame is ERR_COMM_PROTOCOL. */
	enum err (*target)(struct tcp_op *op, struct tcp_link *l, unsigned char **out);
	enum err (*arrived)(struct tcp_op *op, struct tcp_link *l);
	/* The next frame for this link: type, channel and call are set by the caller; sets *body. false: nothing now. */
	enum err (*next)(struct tcp_op *op, struct tcp_link *l, struct tcp_head *h, const unsigned char **body, bool *some_out);
	enum err (*sent)(struct tcp_op *op, struct tcp_link *l);          /* may be NULL */
	enum err (*idle)(struct tcp_op *op, bool *more_out);              /* may be NULL: work between events */
	bool (*done)(const struct tcp_op *op);
	bool (*needs)(const struct tcp_op *op, uint32_t peer);            /* something to or from this peer is missing */
	/* It is this peer's turn: to send, or to take what is ready for it. */
	bool (*awaits)(const struct tcp_op *op, uint32_t peer);
};

/* A group on a mesh: the one that was opened, or a part of it. */
struct tcp_group {
	struct tcp_mesh *mesh;
	struct comm *c;
	struct tcp_group *next;        /* of the mesh */
	uint64_t channel;
	uint32_t size;
	uint32_t *peers;               /* the member's number in the mesh */
	struct comm_call recent[16];   /* by call number: to compare with what a late member calls */
};

struct tcp_split {
	uint64_t digest, count;
	struct tcp_split *next;
};

struct tcp_mesh {
	struct comm *c;                /* the group that was opened */
	struct tcp_identity id;
	uint32_t rank, size, data_links;
	struct tcp_peer *peers;
	struct tcp_group *groups;
	struct tcp_split *splits;
	struct event_base *base;
	struct event *beat;            /* wakes the loop */
	struct tcp_op *op;
	bool beaten;                   /* the beat has come */
	uint64_t began_ns, said_ns;    /* of the operation; our latest STATE */
	/* In the operation: the latest turn; when we came back from being away, and when the deadline was found to be over, 0: never. */
	uint64_t turned_ns, back_ns, late_ns;
	enum err failed;
	struct err_info failure;
	bool noted;                    /* our ABORT is out */
	struct err_info note;          /* the most important failure that anyone told, us included */
};

/* tcp_net.c */
FALLIBLE enum err tcp_listen(const char *where, uint32_t backlog, int *fd_out, struct sockaddr_storage *at_out);
FALLIBLE enum err tcp_connect(const struct sockaddr_storage *at, int *fd_out); /* in progress */
void tcp_tune(int fd, uint32_t deadline_ms);

/* tcp_rendezvous.c */
FALLIBLE enum err tcp_rendezvous(struct tcp_mesh *m, const struct comm_spec *spec);

/* tcp_link.c */
FALLIBLE enum err tcp_link_open(struct tcp_mesh *m, uint32_t peer, uint32_t index, int fd);
void tcp_link_close(struct tcp_link *l);
void tcp_link_resume(struct tcp_link *l);       /* a new operation began */
void tcp_link_kick(struct tcp_link *l);         /* there may be something to send */
void tcp_link_tell(struct tcp_link *l, const struct tcp_head *h, const unsigned char *body); /* on link 0; h->check is set here */
void tcp_link_drain(struct tcp_link *l);        /* reads what is there on link 0 */

/* tcp_run.c */
void tcp_fail(struct tcp_mesh *m, enum err e);  /* err_last() says why; the first one counts */
enum err tcp_at(struct tcp_mesh *m, enum err e, uint32_t peer);
FALLIBLE enum err tcp_run(struct tcp_op *op, struct comm *c);     /* until it is done */
void tcp_heard(struct tcp_link *l);             /* a whole frame on link 0 */
void tcp_broken(struct tcp_link *l, int sys_errno); /* 0: the end of the stream */
uint32_t tcp_member(const struct tcp_group *g, uint32_t peer);
FALLIBLE enum err tcp_poll(struct comm *c);
void tcp_show(struct comm *c, uint32_t member);
uint32_t tcp_silent(struct comm *c, uint32_t member);
void tcp_abort(struct comm *c, struct err_info *f);

/* tcp_block.c */
struct tcp_block {
	unsigned char *p;
	uint64_t bytes;
	uint32_t from;                 /* a peer, or TCP_NOBODY: it is here */
	const unsigned char *source;   /* it is here, but still to be copied to p; NULL: no */
	/* private */
	uint64_t chunk, missing, *checks;
	uint64_t next[TCP_LINKS_MAX];  /* offset of the next chunk to come on a data link */
	uint32_t sends;                /* the first one of this block */
};
struct tcp_send {
	uint32_t block, to;            /* to: a peer */
	/* private */
	uint32_t same_peer, same_block; /* the next ones */
	uint64_t next[TCP_LINKS_MAX];
};
/* Blocks are numbered alike in all members. in_steps: send i waits until blocks 0 … i-1 are here. */
FALLIBLE enum err tcp_blocks_run(struct comm *c, struct tcp_block *blocks, uint32_t block_count, struct tcp_send *sends,
				 uint32_t send_count, bool in_steps);

/* tcp_exchange.c */
FALLIBLE enum err tcp_exchange(struct comm *c, const struct comm_exchange *x);

static inline struct tcp_link *tcp_link_of(struct tcp_mesh *m, uint32_t peer, uint32_t index)
{
	return &m->peers[peer].links[index];
}
