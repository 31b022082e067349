/* exec_count.c: statistics of the elements that a scan has read (verify's level `values`, stats). */
#include "runner/exec_impl.h"
#include "tensor/cast.h"
#include "tensor/stats.h"

/* Elements as they are: without lazy bits. */
static FALLIBLE enum err count_values(struct run *run, uint64_t scan, const unsigned char *bytes)
{
	const struct run_scan *sc = &run->scans[scan];
	enum dtype dtype = (enum dtype)run->srcs[sc->src].dtype;
	uint32_t item = dtype_bytes(dtype);
	uint64_t bins[STATS_BINS] = { 0 };
	struct stats stats = { 0 };

	if (sc->begin % item || sc->end % item) /* a manifest may say so */
		return sources_at(run, sc->src, ERR(FORMAT_MANIFEST, "a digest block ends inside an element"));
	stats_run(dtype, bytes, (sc->end - sc->begin) / item, &stats, run->bins_n ? bins : NULL);
	run_note_stats(run, scan, &stats, bins);
	return OK;
}

/* The same of elements whose conjugation or negation is still to be done: in memory of its own, for a segment is not ours to change. */
static FALLIBLE enum err count_lazy(struct run *run, uint64_t scan, const struct src_info *info, const unsigned char *bytes)
{
	const struct run_scan *sc = &run->scans[scan];
	uint64_t n = sc->end - sc->begin;
	enum dtype dtype = (enum dtype)info->dtype;
	CLEANUP(mem_free_ptr) unsigned char *copy = mem_alloc(n + 1);

	NEED(copy, "no memory for %ju bytes", (uintmax_t)n);
	memcpy(copy, bytes, n);
	if (info->conj)
		TRY(cast_conj(copy, dtype, n / dtype_bytes(dtype)));
	if (info->neg)
		TRY(cast_neg(copy, dtype, n / dtype_bytes(dtype)));
	return count_values(run, scan, copy);
}

enum err exec_count(struct run *run, uint64_t scan, const struct src_info *info, const unsigned char *bytes)
{
	return info && (info->conj || info->neg) ? count_lazy(run, scan, info, bytes) : count_values(run, scan, bytes);
}
