/* plan_doc.h: a plan as GET /v1/jobs/{id}/plan and a dry run show it: what would be read, written and held in memory, and what does not
 * fit. Everything comes from metadata. */
#pragma once
#include "plan/problems.h"
#include "runner/build.h"
#include "session/job.h"

/* Figures of a plan's reads of its source, each part once. Rows that lie apart are read together with the gap between them, unless the
 * gap is larger than the rows. */
struct plan_figures {
	uint64_t needed_bytes, read_bytes;
};
FALLIBLE enum err plan_figures_make(const struct sdict *source, const struct sdict *target, const struct load_plan *plan,
				    struct plan_figures *out);

/* Sets needed_bytes, read_bytes, over_read_ratio and peak_memory_bytes: the buffers of all workers, the run's tables, `metadata_bytes`.
 * Segments are not in it. */
FALLIBLE enum err plan_doc_figures(json_t *doc, const struct job *j, const struct run_build *b, const struct plan_figures *f,
				   uint64_t metadata_bytes);
/* Sets cuts: how the target's first tensors are cut, [{fqn, dtype, shape, chunks: [{rank, offsets, sizes}]}], of a dry run. */
FALLIBLE enum err plan_doc_cuts(json_t *doc, const struct sdict *target);
/* Sets files, file_count and ranks: the run's files of that kind (the first ones), bytes by rank. */
FALLIBLE enum err plan_doc_files(json_t *doc, const struct run_build *b, enum run_file_kind kind);
/* Sets problems (a list of {code, fqn, detail, rank?, expected?, actual?}) and problem_count. */
FALLIBLE enum err plan_doc_problems(json_t *doc, const struct problems *p);

/* Memory that a state dict's structure takes, in bytes. */
uint64_t plan_sdict_bytes(const struct sdict *sd);
