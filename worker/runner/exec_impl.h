/* exec_impl.h: what exec.c, exec_block.c and exec_scan.c share: the slot, which is one task on its way. */
#pragma once
#include "runner/exec.h"
#include "runner/gate.h"

enum slot_phase { SLOT_IDLE, SLOT_FETCH, SLOT_WRITE, SLOT_FINISH, SLOT_SYNC };

struct slot_block {
	uint64_t block;
	unsigned char *data;           /* block.bytes of it, or */
	bool in_segment;               /* … the part's bytes in a segment: written from there, its last page from `page` */
	unsigned char *page;
	bool shared;                   /* an earlier checkpoint has it: nothing is written */
};

/* A part of a target in blocks of Q8_0, on its way. */
struct slot_quant {
	unsigned char *at;             /* where its `bytes` go, which begin `skip` bytes into the first block */
	float *floats;                 /* of `blocks` blocks; mem_free */
	uint32_t skip;
	uint64_t bytes, blocks;
};

struct slot_scan {
	uint64_t scan;
	uint32_t read;
	bool whole_item, direct, skip;
	bool far;                      /* the entry's bytes come from another node's memory (memory.h) */
	bool again;                    /* the entry's bytes were not the checkpoint's: another entry of this scan reads the file */
	bool doubted;                  /* … this one */
	bool bounced;                  /* direct, and read to the wave's memory first */
	unsigned char *direct_at;
	unsigned char *gathered;       /* RUN_STATS: the elements of a source that lie in no row, once they are read; else NULL */
};

/* A part that is an average (a merge): the sum so far, and the elements of the checkpoint that is added next. */
struct slot_legs {
	const struct run_part *part;
	unsigned char *to, *sum, *next;
};

/* A block, or the archive around a payload, that was deferred and must be written after all. */
struct slot_redo {
	uint64_t index, task;          /* of the block or dst; of the task that found it out */
	bool edges;
};

struct slot_stream;

struct slot {
	struct exec *x;
	enum slot_phase phase;
	uint64_t task;
	bool redo;                     /* its block was hashed and counted before */
	uint32_t pending;              /* I/O operations of this slot not yet done */
	struct read_plan reads;
	struct wave wave;
	unsigned char *in, *out;       /* in: exec.in_bytes; out: exec.out_bytes */
	uint64_t out_used;
	struct vec(struct slot_legs) legs;
	uint32_t leg;                  /* the checkpoint whose elements are being read */
	unsigned char *leg_room;       /* leg_bytes of them all */
	uint64_t leg_bytes, leg_used;
	struct vec(struct slot_block) blocks;
	struct vec(struct slot_scan) scans;
	struct vec(struct slot_quant) quants;
	uint64_t next_raw, next_scan;
	struct vec(struct wave_op) writes;
	struct vec(uint32_t) finish;   /* dsts whose head and tail are due */
	struct vec(uint32_t) sync;     /* files to fsync */
	struct slot_stream *stream;    /* RUN_STREAMS */
	unsigned char *edges;          /* heads and tails being written */
};

struct exec {
	const struct exec_spec *spec;
	struct run *run;
	struct files files;
	struct sources sources;
	struct slot *slots;
	uint32_t slot_count;
	bool has_segments;
	bool is_long;                  /* each slot has several tasks: huge pages are worth clearing */
	bool past_cache;               /* scans read past the page cache what is not in it */
	bool gated;                    /* tasks are taken when what they read is there */
	struct gate gate;
	uint64_t in_bytes;             /* two tasks less the tables of a wave, or the largest scan */
	uint64_t out_bytes;            /* what a task makes: dst-driven, blocks and a page for each; RUN_STATS: its scans; else 0 */
	struct vec(struct wave_op *) queue;    /* waiting for room in the engine */
	uint64_t queue_at;
	struct vec(struct slot_redo) redo;
	struct err_info error;         /* the first */
};

/* Queues an operation that must stay where it is until it is done. The file is pinned here. */
FALLIBLE enum err exec_queue(struct slot *s, struct wave_op *op);
FALLIBLE enum err exec_queue_wave(struct slot *s);
/* Can a read of these bytes go past the page cache? */
bool exec_is_aligned(const void *into, uint64_t offset, uint64_t bytes);
/* fn(slot) with SIGBUS as ERR_SEGMENT_SHRUNK; its error comes back. */
FALLIBLE enum err exec_guarded(struct slot *s, enum err (*fn)(struct slot *s));

/* Is all of the target read, so that nothing need be there before? */
bool exec_is_all_read(const struct run *run, const struct run_dst *d);

FALLIBLE enum err exec_block_begin(struct slot *s);
FALLIBLE enum err exec_block_redo(struct slot *s, const struct slot_redo *r);
void exec_block_drop(struct slot *s);                  /* frees what a task that ended early holds */
FALLIBLE enum err exec_block_advance(struct slot *s);  /* all pending I/O is done */
FALLIBLE enum err exec_scan_begin(struct slot *s);
/* Adds the elements of a scan, `bytes`, to its statistics. info: of its item, which may say that they are to be conjugated or negated
 * first; NULL: it has no head. */
FALLIBLE enum err exec_count(struct run *run, uint64_t scan, const struct src_info *info, const unsigned char *bytes);
FALLIBLE enum err exec_scan_advance(struct slot *s);

/* The mode of loads. */
static inline bool exec_fills(const struct run *run)
{
	return run->head->opts.mode == RUN_FILL_SEGMENTS;
}
/* Takes a scan's bytes from [offset, …) of fd, if they are in memory, to its place: sc->direct_at, else s->in. Bytes that go nowhere
 * (verify) are only hashed. *stream: their digests, by `which` (digest.h). *got_out false: not all were in memory. */
FALLIBLE enum err exec_read_cached(struct slot *s, const struct slot_scan *sc, int fd, uint64_t offset, unsigned which,
				   struct digest_stream *stream, bool *got_out);

/* The digest of exactly the scan's bytes; NULL: there is none. */
const struct block_digest *exec_digest_of(const struct run *run, const struct run_scan *scan);
/* Copies the scan's elements, in storage order, to every target chunk that holds some of them. */
FALLIBLE enum err exec_scatter(struct slot *s, const struct run_scan *scan, const struct src_info *info, const unsigned char *bytes);
/* exec_memory.c. *done_out: the scan's bytes were in memory, or will come with the wave, if that is not full. info NULL: it has no head. */
FALLIBLE enum err exec_take_memory(struct slot *s, struct slot_scan *sc, const struct src_info *info, bool *done_out, bool *full_out);
/* The wave of a scan that is `far` is over. What has not come gets an entry anew. */
FALLIBLE enum err exec_take_far(struct slot *s, uint64_t index);
/* Taking a scan's bytes ended with e. If other hosts sent them (spread.h), the scan gets an entry anew, which reads the file: OK. */
FALLIBLE enum err exec_doubt(struct slot *s, uint64_t index, enum err e);

/* exec_share.c. The block's digests are known: sets sb->shared if it need not be written (now). */
FALLIBLE enum err exec_share_block(struct slot *s, struct slot_block *sb);
/* The same of the archive around a payload. */
FALLIBLE enum err exec_share_edges(struct slot *s, uint32_t dst, bool *shared_out);
/* All of a file with a base is equal: makes the link. If it cannot be made, all of the file is queued to be written. */
FALLIBLE enum err exec_share_file(struct slot *s, uint32_t file);
/* Writes [p, p + bytes) of a target file, at once or by the engine; s->writes has room. */
FALLIBLE enum err exec_push_write(struct slot *s, uint32_t file, unsigned char *p, uint64_t bytes, uint64_t offset);
/* A block of a target file is written: a file whose last block this was is noted in s->sync. */
FALLIBLE enum err exec_count_file(struct slot *s, uint32_t file);
/* Ends the files that are noted: cuts off what O_DIRECT wrote behind their end, and syncs them. The phase is SLOT_SYNC then. */
FALLIBLE enum err exec_end_files(struct slot *s);

enum { EXEC_COPY_AGAIN = 256 << 10 };  /* bytes of a source that are read again at a time, for a digest that several pieces share */
FALLIBLE enum err exec_copy_begin(struct slot *s);
FALLIBLE enum err exec_copy_advance(struct slot *s);

/* Buffers of a task's bytes that a stream has: base, now, and two for what is written. */
enum { EXEC_STREAM_BUFFERS = 4 };
/* Bytes that an encoder, or decoders, take besides. */
uint64_t exec_stream_memory(const struct run *run);
FALLIBLE enum err exec_stream_begin(struct slot *s);
FALLIBLE enum err exec_stream_advance(struct slot *s);
void exec_stream_close(struct slot *s);
