/* frame.h: messages between coordinator and workers over a Unix stream socket: one fixed head, a JSON text, file descriptors.
 *
 *   head (24 bytes, little endian): magic "DCPD", version u16, type u16, json_bytes u32, fd_count u32, job generation u64
 *   the JSON text
 *   one zero byte for each batch of at most 250 descriptors, which travel with it (SCM_RIGHTS), in order
 *
 * Non-blocking both ways: the reader keeps partial frames, the writer keeps a queue. A wrong magic, version, size or fd count
 * ends the connection (ERR_PROTOCOL, also from every later call). A peer that died is no error to the reader (closed_out);
 * the writer gets ERR_WORKER_LOST, and should read on: what the peer said before it died may still be there. */
#pragma once
#include "base/buf.h"

enum { FRAME_JSON_MAX = 64 << 20, FRAME_FDS_MAX = 200000, FRAME_VERSION = 1 };

enum frame_type {
	/* coordinator → worker */
	FRAME_HELLO = 1,       /* {"build_id","role":"gang"|"lookup","index","count","shm_limit"…}; first message both ways */
	FRAME_JOB,             /* to the leader: the job's document; fds: segments, in the order the document lists them */
	FRAME_RUN,             /* to the other workers: run memfd, then segments; and from the leader, to be relayed */
	FRAME_CANCEL,
	FRAME_COMMIT_OK,       /* to the leader: you may commit, cancel is no longer possible */
	FRAME_SEGMENTS,        /* to the leader: the segments it asked for */
	FRAME_PEERS_DONE,      /* to the leader: all other workers finished their part */
	FRAME_LOOKUP,          /* to a look-up worker: a question */
	FRAME_RENDEZVOUS_ALL,        /* to each member: what all of them sent by FRAME_RENDEZVOUS */
	FRAME_SEALED,          /* to the leader: all ranks have sealed what it began to read while it was being filled */
	/* worker → coordinator */
	FRAME_STATE = 32,      /* {"state":"planning"|"running"|"committing","stage","bytes_total"…} */
	FRAME_PROGRESS,        /* {"bytes_done","bytes_total","ranks":[…]} */
	FRAME_WANT_SEGMENTS,   /* {"ranks":[{"rank","bytes","image_bytes"}…]} */
	FRAME_WANT_COMMIT,     /* {"staging":"…"} */
	FRAME_DONE,            /* a worker has finished its part; leader: {"result":{…}} */
	FRAME_FAILED,          /* {problem} */
	FRAME_ANSWER,          /* to a FRAME_LOOKUP: {"ok":{…}} or {"problem":{…}}; raw bytes may follow in a memfd */
	FRAME_IO,              /* {"main":[bytes read, bytes written],…}: by this worker, since the frame before */
	FRAME_RENDEZVOUS,            /* how this member of a communication group is found */
};

struct frame {
	uint16_t type;
	uint64_t generation;   /* of the job attempt; frames of another generation are dropped */
	struct str json;       /* valid until the next frame_read */
	int *fds;              /* the receiver takes one by putting -1 in its place; the next frame_read closes the others */
	uint32_t fd_count;
};

struct frame_conn;

/* fd stays the caller's, whose event loop may watch it: frame_conn_free closes queued and received descriptors only. */
FALLIBLE enum err frame_conn_new(int fd, struct frame_conn **out);
void frame_conn_free(struct frame_conn *c);
/* got_out: a whole frame is in *f. false: no more for now. closed_out: the peer is gone. */
FALLIBLE enum err frame_read(struct frame_conn *c, struct frame *f, bool *got_out, bool *closed_out);
/* Queues and tries to send. fds are duplicated: the caller keeps its own. */
FALLIBLE enum err frame_send(struct frame_conn *c, uint16_t type, uint64_t generation, struct str json, const int *fds,
			     uint32_t fd_count);
FALLIBLE enum err frame_flush(struct frame_conn *c, bool *empty_out);       /* when writable */
bool frame_wants_write(const struct frame_conn *c);
FALLIBLE enum err frame_wait(struct frame_conn *c, int timeout_ms, struct frame *f, bool *got_out, bool *closed_out); /* blocking */
