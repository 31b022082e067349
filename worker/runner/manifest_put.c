/* manifest_put.c: the manifest of a finished run (see manifest_put.h). */
#include <stdlib.h>
#include <string.h>

#include "base/num.h"
#include "runner/manifest_put.h"
#include "io/digest.h"
#include "os/fs.h"
#include "store/record.h"

static void put_item(struct buf *b, const struct run *run, const struct run_dst *d)
{
	char hex[33];

	digest_hex(d->xxh3_128, hex);
	buf_printf(b, "[%ju,%ju,\"%08x\",\"%s\"", (uintmax_t)d->offset, (uintmax_t)d->length, d->crc32, hex);
	if (d->part_count > 1) {
		buf_puts(b, ",[");
		for (uint64_t i = 0; i < d->part_count; i++) {
			const struct run_part *p = &run->parts[d->first_part + i];
			digest_hex(p->xxh3_128, hex);
			buf_printf(b, "%s%ju,\"%s\"", i ? "," : "", (uintmax_t)p->end, hex);
		}
		buf_puts(b, "]");
	}
	buf_puts(b, d->bare || d->kind == RUN_DST_RAW ? ",true]" : "]");
}

static void put_edges(struct buf *b, const struct run_dst *d)
{
	char hex[33] = "";

	if (!d->bare && d->kind == RUN_DST_TENSOR)
		digest_hex(d->edges_xxh3, hex);
	buf_printf(b, "\"%s\"", hex);
}

static int by_place(const void *a, const void *b, void *user)
{
	const struct run *run = user;
	const struct run_dst *x = &run->dsts[*(const uint32_t *)a], *y = &run->dsts[*(const uint32_t *)b];

	return num_order(x->file, y->file) ?: num_order(x->offset, y->offset);
}

static FALLIBLE enum err mtime_of(const struct run *run, const struct run_file *f, const struct staging *st, int64_t *out)
{
	struct str name = run_file_name(run, f);
	char z[ERR_FILE_MAX];

	*out = 0;
	if (!st)
		return OK;
	if (name.n >= sizeof z)
		return ERR(LIMIT_EXCEEDED, "a file name of %zu bytes", name.n);
	memcpy(z, name.p, name.n);
	z[name.n] = '\0';
	return staging_mtime(st, z, out);
}

static FALLIBLE enum err put_files(struct buf *b, const struct run *run, const uint32_t *order, const struct staging *st)
{
	uint64_t at = 0;
	bool first_file = true;
	int64_t mtime;

	buf_puts(b, ",\"files\":[");
	for (uint32_t f = 0; f < run->files_n; f++) {
		const struct run_file *rf = &run->files[f];
		if (rf->kind != RUN_FILE_TARGET)
			continue;
		buf_puts(b, first_file ? "\n{\"name\":" : ",\n{\"name\":");
		first_file = false;
		buf_json_str(b, run_file_name(run, rf));
		TRY(mtime_of(run, rf, st, &mtime));
		buf_printf(b, ",\"bytes\":%ju,\"mtime_ns\":%jd,\"items\":[", (uintmax_t)rf->bytes, (intmax_t)mtime);
		uint64_t first = at;
		for (; at < run->dsts_n && run->dsts[order[at]].file == f; at++) {
			buf_puts(b, at == first ? "" : ",");
			put_item(b, run, &run->dsts[order[at]]);
		}
		buf_puts(b, "],\"edges\":[");
		for (uint64_t i = first; i < at; i++) {
			buf_puts(b, i == first ? "" : ",");
			put_edges(b, &run->dsts[order[i]]);
		}
		buf_puts(b, "]}");
	}
	buf_puts(b, "]");
	return OK;
}

enum err manifest_put(struct buf *b, const struct manifest_head *head, const struct run *run, const struct staging *st)
{
	CLEANUP(mem_free_ptr) uint32_t *order = mem_zalloc(run->dsts_n, sizeof *order);
	struct manifest_metadata metadata = { head->metadata_name, head->save_id, head->metadata_bytes, { 0 } };
	uint64_t bytes = 0;

	NEED(order, "no memory for a manifest of %ju items", (uintmax_t)run->dsts_n);
	for (uint32_t i = 0; i < run->dsts_n; i++)
		order[i] = i;
	qsort_r(order, run->dsts_n, sizeof *order, by_place, (void *)(uintptr_t)run);
	for (uint64_t i = 0; i < run->files_n; i++)
		bytes += run->files[i].kind == RUN_FILE_TARGET ? run->files[i].bytes : 0;
	memcpy(metadata.xxh3_128, head->metadata_xxh3, sizeof metadata.xxh3_128);
	buf_puts(b, "{\"dcpd\":1");
	if (head->record)
		TRY(record_put(b, head->record));
	buf_printf(b, ",\"job\":\"%s\",\"attempt\":%ju,\"kind\":\"%s\",\"created_at\":\"%s\",\"uid\":%u", head->job,
		   (uintmax_t)head->attempt, head->kind, head->created_at, head->uid);
	for (size_t i = 0; i < head->hosts.n; i++) {
		buf_puts(b, i ? "," : ",\"hosts\":[");
		buf_json_str(b, head->hosts.v[i]);
	}
	if (head->hosts.n)
		buf_puts(b, "]");
	if (head->has_generation)
		buf_printf(b, ",\"generation\":%ju", (uintmax_t)head->generation);
	if (head->unsynced)
		buf_puts(b, ",\"sync\":false");
	buf_printf(b, ",\"world_size\":%ju,\"bytes\":%ju,\"metadata\":", (uintmax_t)head->world_size, (uintmax_t)bytes);
	manifest_put_metadata(b, &metadata);
	TRY(put_files(b, run, order, st));
	return manifest_put_self(b);
}
