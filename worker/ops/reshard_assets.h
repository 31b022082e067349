/* reshard_assets.h: the small files that travel along with a reshard or merge (target.copy_assets): config.json, tokenizers … */
#pragma once
#include "runner/build.h"
#include "runner/input.h"
#include "store/assets.h"

struct reshard_assets {
	struct assets found;
	struct build_other *others;    /* those that are copied */
	uint64_t count;
};

/* Finds the files in target.assets, else beside the source, and adds them to the sources of the run. The job's result gets "assets", their
 * names, and "assets_left_out", a list of {"file","why"}, if there are such. Nothing if the request does not ask for it. */
FALLIBLE enum err reshard_assets_add(struct job *j, const struct input *source, struct run_build *b, struct reshard_assets *out);
void reshard_assets_free(struct reshard_assets *a);
