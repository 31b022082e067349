/* files.h: one worker's view of the files and segments of a run: opened and mapped when first used, closed again when there are too
 * many. Files that an I/O operation uses are pinned. */
#pragma once
#include "os/seg.h"
#include "runner/run.h"
#include "store/store.h"

enum { FILES_OPEN_MAX = 512 };

struct files {
	struct run *run;
	const struct stores *stores;   /* by run_dir.root */
	const int *fds;                /* descriptors that came with the run, by run_file.fd_index */
	uint32_t fd_count;
	struct store_at *dirs, *opened;        /* store NULL or handle -1: not open; of those in fds a borrowed one */
	uint32_t *pins;
	struct store_at *direct;       /* the same files once more, past the page cache */
	bool *refuses_direct;
	struct store_at *under;        /* by file: the stored file behind one that windows serve (spread.h) */
	struct store spread;           /* the store that serves files from windows */
	bool as_stored;                /* no file is served from windows */
	struct seg_map *maps;
	struct seg_leavings *leavings; /* NULL: unmapped by files_close */
	uint32_t open_count, clock;
};

FALLIBLE enum err files_open(struct run *run, const struct stores *stores, const int *fds, uint32_t fd_count,
			     struct files *out);
void files_close(struct files *f);
/* The open file, borrowed and pinned until files_unpin; its store may end it meanwhile (finish). Errors name the file. */
FALLIBLE enum err files_pin(struct files *f, uint32_t file, struct store_at **out);
/* Opens a file that stands for another one (run_file.spare), unless it is open. False: it is gone. */
bool files_spare_answers(struct files *f, uint32_t file);
/* Gives a spare file up: from now on no worker asks its node for this file, or for the others of its folder. */
void files_spare_gone(struct files *f, uint32_t file);
void files_unpin(struct files *f, uint32_t file);
/* The descriptor that reads a pinned source file past the page cache (O_DIRECT); -1: its file system refuses that. */
int files_direct(struct files *f, uint32_t file);
/* The direct descriptor was opened, but its file system refused a read: files_direct() is -1 from now on, and reads are buffered. */
void files_refuse_direct(struct files *f, uint32_t file);
/* Makes the target, which is not there yet, at its full size. */
FALLIBLE enum err files_make(struct files *f, uint32_t file);
/* Makes the target `to` a link to the source `from`, whose run_file tells what it must be. */
FALLIBLE enum err files_link(struct files *f, uint32_t from, uint32_t to);
/* A segment's memory (all of file.bytes). ERR_SEGMENT_SHRUNK if it is smaller by now. Of RUN_FILE_MEMORY NULL: offsets are
 * addresses. */
FALLIBLE enum err files_segment(struct files *f, uint32_t file, unsigned char **p_out);
/* Finds the image's byte `offset`, also if the image comes through a ring: the bytes that a task reads lie in a row. */
FALLIBLE enum err files_at(struct files *f, uint32_t file, uint64_t offset, unsigned char **p_out);
