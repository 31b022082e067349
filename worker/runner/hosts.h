/* hosts.h: one save by the daemons of several hosts, each of which sees the segments of its own ranks only, over a storage that all see.
 *
 * They meet in a directory beside the target, `.dcpd-hosts-{id}` (in a bucket: store/s3_store_hosts.c); no daemon talks to another, and
 * no trainer is needed any more:
 *
 *   heads-K   the headers of host K's images: from all of them every host makes the same plan, and nobody has to be told of it
 *   data/     what becomes the checkpoint; host K writes the files of its ranks
 *   part-K    the digests of what host K wrote, and of its replicas of what others wrote: its files are durable
 *   beat-K    a number that grows while host K is at it
 *   end-K     how it ended for host K, in JSON
 *
 * Host 0 leads: it makes the directory, waits for all parts, and commits as any save does, by one rename of data/. A host that fails
 * says so, one whose beat stops is given up after `timeout_s`: then the save fails on all hosts, and the leader removes everything.
 * A leader that is restarted goes on, or finds that it was given up; if it never comes back, a sweep removes what is left.
 *
 *   spec.hosts: {"id":"…","index":0,"names":["a","b"],"ranks":[[0,1],[2,3]],"timeout_s":20}
 * ranks: which ranks of the whole world host K's state dict has, in its own order. */
#pragma once
#include "runner/input.h"
#include "runner/run.h"
#include "runner/write.h"
#include "store/staging.h"

struct hosts;

/* NULL: this save is of one host. Else meets the others, as far as they are needed to begin. */
FALLIBLE enum err hosts_open(struct job *j, struct hosts **out);
/* The structure of all ranks of all hosts, as if they were here; waits for them. out->state_dict has the whole world. */
FALLIBLE enum err hosts_input(struct hosts *h, struct input *out);
/* The store as this host of the save sees it: it writes to the shared directory, tells its digests, and either waits for those of all
 * others, to commit what it then knows all of, or waits until the leader has committed. */
struct write_store hosts_store(struct hosts *h);
/* Has an attempt that broke off written all of this host, or is the save committed already? Then hosts_await_again only waits for the
 * commit, and fills the job's result. */
bool hosts_written(struct hosts *h);
FALLIBLE enum err hosts_await_again(struct hosts *h);
/* The end of a host's part that ended with e: OK, with the job's result, if an attempt broke off and the leader has committed the save
 * meanwhile, and is gone. */
FALLIBLE enum err hosts_end_again(struct hosts *h, enum err e);
/* Tells the others how it ended here (e: err_last() has why), and tidies up. */
void hosts_close(struct hosts *h, enum err e);

/* ---- a planned save in parts (planned_save.h) ----
 *
 * PyTorch's ranks write before the coordinator has the list of all. A rank on another host than the coordinator's has its daemon write its
 * files to a place of its own, `.dcpd-hosts-{id}`, with a manifest; the coordinator's save names the places, and moves the files. */
/* The store of such a save: nothing is committed, the place stays. id: must outlive it. */
struct write_store hosts_part_store(const char *id);
/* Takes these files of the run from place `id` into the staging directory, their digests into the run. */
FALLIBLE enum err hosts_part_take(struct write *w, const char *id, const uint32_t *files, uint32_t count);
FALLIBLE enum err hosts_part_remove(const struct stores *stores, const struct ref *target, const char *id);
void hosts_part_drop(struct job *j, const char *id);         /* the save failed: nobody takes it */
bool hosts_part_id(const char *id);

/* A mark beside the target that says whether two daemons see one storage. action: "put", "look" (*seen: is it there?) or "drop". */
FALLIBLE enum err hosts_token(struct store_at top, const char *name, const char *token, const char *action, bool *seen);
