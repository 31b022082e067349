/* doctor_drivers.h: the doctor's rows `cuda` and `nccl`: what a probe (devices.h) heard from libcuda.so.1 and libnccl.so.2, and the command
 * that mends it. Where the kernel has NVIDIA's driver and its library does not answer, no GPU can be used, and nothing else says why. */
#pragma once
#include <jansson.h>
#include "server/doctor.h"

enum { DOCTOR_DRIVERS = 2 };

struct doctor_heard {
	const char *no_cuda, *no_nccl;      /* why there is none; NULL: it answers */
	const char *gpu_problem;            /* of a GPU that does not answer, though the driver does; NULL: all answer */
	const char *nccl_version;           /* "2.28.9"; NULL: not told */
	bool is_pending;                    /* the probe has not answered yet */
};

/* Of a probe's "devices": the words of the first GPU that does not answer, though the driver does; NULL: all answer. */
const char *doctor_gpu_problem(const json_t *found);
void doctor_drivers_say(const struct doctor_host *h, const struct doctor_heard *heard, struct doctor_finding out[DOCTOR_DRIVERS]);
/* The same of a probe that is started, and ended, here. Takes seconds at the most: one that does not answer is a finding. */
void doctor_drivers_ask(const struct doctor_host *h, struct doctor_finding out[DOCTOR_DRIVERS]);
