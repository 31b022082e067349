/* t_build.h: what every plan of written files must be, whatever it is for: each byte of each payload in one part, each part in one
 * block that lies in its file, each block in one task, and no two items on the same bytes. */
#pragma once
#include <string.h>
#include "lib/t.h"
#include "runner/build.h"

static inline void t_build_check_parts(const struct run_build *b)
{
	for (uint64_t i = 0; i < b->dsts.n; i++) {
		const struct run_dst *d = &b->dsts.v[i];
		uint64_t at = 0;
		for (uint64_t k = 0; k < d->part_count; k++) {
			const struct run_part *p = &b->parts.v[d->first_part + k];
			assert_int_equal(p->dst, i);
			assert_int_equal(p->begin, at);
			assert_true(p->end >= p->begin);
			at = p->end;
		}
		assert_int_equal(at, d->payload_bytes);
		assert_int_equal(atomic_load(&d->parts_left), d->part_count);
		assert_true(d->offset + d->length <= b->files.v[d->file].bytes);
		for (uint64_t k = 0; k < i; k++) /* small plans only */
			assert_true(b->dsts.v[k].file != d->file || b->dsts.v[k].offset >= d->offset + d->length ||
				    b->dsts.v[k].offset + b->dsts.v[k].length <= d->offset);
	}
}

/* A file's last block may reach to the end of its page. */
static inline void t_build_check_blocks(const struct run_build *b)
{
	uint64_t parts = 0, blocks = 0, tasks = 0;

	for (uint64_t i = 0; i < b->blocks.n; i++) {
		const struct run_block *k = &b->blocks.v[i];
		const struct run_file *f = &b->files.v[k->file];
		assert_true(k->offset + k->bytes <= ((f->bytes + 4095) & ~4095ull));
		assert_true(!f->direct || (k->offset % 4096 == 0 && k->bytes % 4096 == 0));
		for (uint32_t p = 0; p < k->part_count; p++, parts++) {
			const struct run_part *part = &b->parts.v[b->block_parts.v[k->first_part + p]];
			const struct run_dst *d = &b->dsts.v[part->dst];
			assert_int_equal(d->file, k->file);
			uint64_t at = d->offset + d->payload_off + part->begin;
			assert_true(at >= k->offset && at + (part->end - part->begin) <= k->offset + k->bytes);
		}
	}
	assert_int_equal(parts, b->parts.n);
	bool *seen = mem_zalloc(b->blocks.n, sizeof *seen);
	for (uint64_t i = 0; i < b->tasks.n; i++) {
		const struct run_task *t = &b->tasks.v[i];
		uint64_t bytes = 0;
		for (uint64_t k = t->first; k < t->first + t->count; k++, blocks++) {
			assert_true(k < b->blocks.n && !seen[k]);
			seen[k] = true;
			bytes += b->blocks.v[k].bytes;
		}
		assert_true(bytes <= b->opts.task_bytes + b->opts.task_bytes / 4);
	}
	mem_free(seen);
	assert_int_equal(blocks, b->blocks.n);
	for (uint64_t r = 0; r < b->ranks.n; r++) {
		assert_int_equal(b->ranks.v[r].first_task, tasks);
		tasks += b->ranks.v[r].task_count;
	}
	assert_int_equal(tasks, b->tasks.n);
}
