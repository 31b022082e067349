/* input.h: what a job reads: a stored checkpoint or a state dict in shared memory, behind one face. */
#pragma once
#include "format/image.h"
#include "format/torch_item.h"
#include "runner/run.h"
#include "runner/spec.h"
#include "store/checkpoint.h"

struct plan_prints;

struct input {
	struct job *job;
	struct checkpoint *checkpoint; /* or */
	struct sdict *images;          /* what the ranks' segments hold, replicas included */
	const struct rank_segments *state_dict;        /* its segments */
	struct sdict *sd;              /* of either */
	uint32_t world_size;
	bool verifies;                 /* set by verify before input_open: damage is noted in the job's `checked` */
	const struct checkpoint_instead *instead;      /* set by a repair before input_open; else NULL */
	bool has_spool;                /* behind sd's other files there is one of tensors that are in no checkpoint: a spool, as they are */
	uint32_t spool_fd;             /* … of the job */
	uint64_t spool_bytes;
	struct checked *checked;       /* values are compared, and counted here; NULL: not compared, and the job's `checked` says so */
};

/* Does the job compare digests and CRC32s (options.verify)? */
bool input_verifies(const struct job *j);

/* ref: a member of the job's spec. Bytes that no digest covers are counted in the job's `checked`. */
FALLIBLE enum err input_open(struct job *j, const struct ref *ref, struct input *out);
void input_close(struct input *s);
/* Undoes transforms into a spool; before anything copies locs. digested: but for what can be checked as it is (spool.h). */
FALLIBLE enum err input_undo_transforms(struct job *j, struct input *s, bool digested);
/* From now on the input shows only what `spec` selects (include, exclude). After the transforms; the view is the caller's, and is freed
 * after the input was used. */
FALLIBLE enum err input_select(struct input *s, const struct spec *spec, struct spec_view *view);
/* Adds to an error where a value lies in the checkpoint, and its FQN. */
enum err input_at_value(const struct input *s, const struct sd_value *v, enum err e);
/* Reads the value of a torch.save archive in memory (item_read_value over memory). */
FALLIBLE enum err input_item_value(const void *bytes, uint64_t n, struct item_value *out);
/* Adds its files or segments to the run. *file_map_out: run file per file of s->sd (mem_free). */
FALLIBLE enum err input_add_files(struct input *s, struct run_build *b, bool writable,
				   uint32_t **file_map_out);
enum run_src_kind input_kind(const struct input *s);
const struct manifest *input_manifest(const struct input *s);
/* A value's torch.save archive, whole (mem_free), compared with the manifest's digest or with the CRC32s of its records. */
FALLIBLE enum err input_value(const struct input *s, const struct sd_value *v, void **bytes_out, uint64_t *n_out);

/* Of a read of a segment: a short one means that it was shrunk. */
enum err input_segment_error(enum err e);
/* The header of a rank's image as it is (mem_free), or parsed. */
FALLIBLE enum err input_read_header(const struct rank_segment *r, const int *fds, void **out, uint64_t *n_out);
FALLIBLE enum err input_read_image(const struct rank_segment *r, const int *fds, struct image **out);
/* The same, and notes each header in `prints` (plan_cache.h). */
FALLIBLE enum err input_open_noted(struct job *j, const struct ref *ref, struct plan_prints *prints, struct input *out);
/* Parses the images of a state dict's segments. */
FALLIBLE enum err input_images(const struct rank_segments *s, const int *fds, struct sdict **out);
/* Adds a segment to the run, as that of `rank`. */
FALLIBLE enum err input_add_segment(struct run_build *b, const struct rank_segment *r, uint32_t rank, bool writable, uint32_t *file_out);
/* Sets name, bytes and descriptor of a segment that the run has, and how it is filled. */
FALLIBLE enum err input_set_segment(struct run_build *b, const struct rank_segment *r, struct run_file *f);
