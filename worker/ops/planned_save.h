/* planned_save.h: a save whose items, files and metadata a client chose: PyTorch's planners do, and its readers must find all as they said.
 *
 * The source is a state dict of one rank with two U8 tensors: `items`, a JSON text, and `metadata`, the pickle (absent in a dry run,
 * which tells the places that the pickle must name). The bytes lie in `parts`, other state dicts of one rank each:
 *
 *     {"metadata_name":".metadata", "files":[["__0_0.distcp",0,false],…],        name, rank, ends where its last item ends
 *      "items":[[file, part, offset in the part's segment, bytes, "model.w", "float32", [8,4]],…]}
 *
 * A file that a rank of another host has written already (hosts.h) has the place's id as a fourth member; its items' part is the number of
 * parts.
 * dtype null: bytes that go into the file as they are (a value, an item that an extension has transformed). */
#pragma once
#include "session/job.h"

FALLIBLE enum err planned_save_job(struct job *j);
