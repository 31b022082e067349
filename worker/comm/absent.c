/* absent.c: back ends that this build does not have: comm_open answers ERR_BACKEND_UNAVAILABLE. One that arrives takes its line away. */
#include "comm/comm_impl.h"

const struct comm_ops *comm_hier_ops(void) { return NULL; }
