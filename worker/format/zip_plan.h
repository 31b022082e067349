/* zip_plan.h: a target file that is a zip archive of stored records, as a file plan: records whose bytes are known, and records that end
 * with a chunk of the target, whose CRC-32 is put in when the chunk has been written (struct file_plan_crc).
 *
 *     struct zip_plan z = { .p = plan };
 *     TRY(zip_plan_bytes(&z, name, bytes));
 *     TRY(zip_plan_chunk(&z, &entry, head, chunk, payload_bytes, 64));
 *     TRY(zip_plan_end(&z, file_name));
 *     zip_plan_free(&z);                         after an error too */
#pragma once
#include "format/file_plan.h"
#include "format/zip.h"

struct zip_plan {
	struct file_plan *p;
	struct vec(struct zip_entry) entries;
	struct vec(uint32_t) items;    /* per entry: the plan's item that its CRC-32 is of; UINT32_MAX: it is known */
	uint64_t offset;               /* where the next record begins */
};

/* Names and comments are borrowed until zip_plan_end. */
FALLIBLE enum err zip_plan_bytes(struct zip_plan *z, struct str name, struct str bytes);
/* The record's bytes: `head`, then the chunk's payload. align: what the first byte of `head` begins at a multiple of. */
FALLIBLE enum err zip_plan_chunk(struct zip_plan *z, struct zip_entry entry, struct str head, uint64_t chunk, uint64_t payload_bytes,
				 uint32_t align);
/* The directory; the plan has its one file then. */
FALLIBLE enum err zip_plan_end(struct zip_plan *z, struct str file_name);
void zip_plan_free(struct zip_plan *z);
