/* lookup.h: questions to a look-up worker (ctl/README.md, "Look-ups"): one function per question. A question stays JSON,
 * unlike a job: it has two or three members, which its function reads once. Segments are typed (session/rank_segments.h). */
#pragma once
#include "session/job.h"
#include "store/checkpoint.h"

/* ERR_BUSY with `actual` bytes: the coordinator has granted less room for an answer in a memfd. It asks again once it has that. */
FALLIBLE enum err lookup_room(const json_t *q, uint64_t bytes);
/* Members of a checkpoint's object in a list, without the braces. */
FALLIBLE enum err lookup_put_summary(const struct store *store, const char *path, enum format format, struct buf *out);
FALLIBLE enum err lookup_list(struct worker *w, const json_t *q, struct buf *out);
FALLIBLE enum err lookup_loadable(struct worker *w, const json_t *q, struct buf *out);
FALLIBLE enum err lookup_find(struct worker *w, const json_t *q, struct buf *out);
FALLIBLE enum err lookup_runs(struct worker *w, const json_t *q, struct buf *out);
FALLIBLE enum err lookup_tensors(struct worker *w, const json_t *q, const int *fds, uint32_t fd_count, struct buf *out);
FALLIBLE enum err lookup_images(struct worker *w, const json_t *q, const int *fds, uint32_t fd_count, struct buf *out);
FALLIBLE enum err lookup_digests(struct worker *w, const json_t *q, const int *fds, uint32_t fd_count, struct buf *out, int *fd_out);
FALLIBLE enum err lookup_device_copy(struct worker *w, const json_t *q, const int *fds, uint32_t fd_count, struct buf *out);
FALLIBLE enum err lookup_device_image(struct worker *w, const json_t *q, const int *fds, uint32_t fd_count, struct buf *out,
				       int *fd_out);
FALLIBLE enum err lookup_locate(struct worker *w, const json_t *q, const int *fds, uint32_t fd_count, struct buf *out, int *fd_out);
FALLIBLE enum err lookup_slice(struct worker *w, const json_t *q, const int *fds, uint32_t fd_count, struct buf *out, int *fd_out);

/* A question to a look-up worker: {"ok":…} in `answer`; *fd_out: a memfd with bytes, or -1. */
FALLIBLE enum err lookup_answer(struct worker *w, const json_t *question, const int *fds, uint32_t fd_count,
				struct buf *answer, int *fd_out);
