/* parts.h: the files of a checkpoint that is a directory: those in it, and those in folders that a format has (format_folder), by their
 * paths. */
#pragma once
#include "store/store.h"

/* As store_list, of files and folders; a folder's name ends with '/'. Folders of formats are entered after their names were told. */
FALLIBLE enum err parts_list(struct store_at dir, store_entry_fn fn, void *user);
