/* beside.h: dcpd's own pages of a checkpoint that is one file: hidden files in the same folder, named after it.
 *
 *   .NAME.dcpd.json         its manifest (manifest.h) with the record (record.h): the receipt that its commit left
 *   .NAME.dcpd-notes.json   its notes (notes.h)
 *
 * A page can outlive its file, or come to lie beside another one of the same name. So the manifest counts only for a file of the size and
 * the time of writing that it was made for; notes name the content that they are about. A file that is copied without its pages has none;
 * copied with them and with its times (cp -a, rsync -a) it keeps what they say.
 *
 * Commits, removals and undeletes move the pages with the file (posix_beside.c). */
#pragma once
#include <stdbool.h>

enum { BESIDE_MAX = 4600 };            /* bytes of a path of a page, with the NUL */

/* The path of the page `page` (a name that begins with a point) of the file `name`. False: the name is too long for one, and has none. */
bool beside_path(const char *name, const char *page, char path[BESIDE_MAX]);
/* Is this the name of a manifest's page, or of one that is being written? */
bool beside_is(const char *name);
