/* build_id.h: what coordinator and worker compare in HELLO. They are built and installed together: messages may change between any
 * two builds, so a worker of another build is refused instead of being half understood. Raise the number with every change of the
 * messages in README.md. */
#pragma once

#define BUILD_ID (DCPD_VERSION "+ctl4")
