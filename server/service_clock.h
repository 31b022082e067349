/* service_clock.h: the clocks of the coordinator.
 *
 * The wall clock may jump by any amount at any time, so it is for records that people read and never decides. Two clocks decide:
 *   - CLOCK_MONOTONIC (base/clock.h): timeouts within this process.
 *   - service time: leases, stalls, retention, whatever a restart must not forget. It runs while the daemon can hear its clients, and
 *     stands still while it cannot: silence then says nothing about them.
 *       suspend, SIGSTOP, a paused virtual machine: trainers stood still too, or could not be heard; at most 2 s count.
 *       restart: the journal keeps service time (each minute and at the end), the down time does not count, and the leases of ranks
 *       begin anew. A crash may take back a minute: leases end later, never earlier.
 *       reboot: as a restart. /dev/shm is empty then, so state dicts have nothing left to keep; jobs are kept a little longer. */
#pragma once
#include <stdbool.h>
#include "base/clock.h"

int64_t clock_service_ms(void);              /* above 0 */
void clock_service_begin(int64_t ms);        /* as the journal has it; once, before the first reading */
/* Has the wall clock gone as fast as CLOCK_BOOTTIME for the last hour? After a jump, and after a start at which it was more than a day
 * ahead of the journal's last time, nothing that is decided by it may remove anything until then. Read at least once a second. */
bool clock_wall_is_sane(void);
void clock_wall_begin(int64_t last_ms);      /* the wall clock when the journal was last written; 0: not known */
int64_t clock_service_wall(int64_t service_ms);      /* what the wall clock shows, showed or will show then: for records */
