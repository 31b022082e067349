/* posix.h: a store on a file system: a checkpoint is a directory, a handle a descriptor, and the commit one rename.
 *
 * The face costs nothing over the bare calls: the I/O engine gets the descriptors themselves (fd_of). */
#pragma once
#include "store/store.h"

extern const struct store_ops posix_ops;

/* A directory or file of the caller's, outside all storages: to be read like one of a store. */
struct store_at posix_at(int fd);
