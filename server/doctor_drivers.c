/* doctor_drivers.c: see doctor_drivers.h. */
#include "server/doctor_drivers.h"

#include <jansson.h>
#include <signal.h>

#include "base/clock.h"
#include "base/jtext.h"
#include "ctl/build_id.h"
#include "ctl/frame.h"
#include "os/spawn.h"

enum { PROBE_MS = 15000, END_MS = 1000 };

/* Parts of reasons that a probe gives, and the command that mends each, in a container and outside. The first part that fits counts. */
static const struct {
	const char *part, *container, *host;
} mends[] = {
	{ "was not found", "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility (Compose: compose.gpu.yaml)",
	  "apt install libcuda1, of the release that the row nvidia_driver names" },
	{ "cannot be loaded", "docker run --gpus all, in an image without a libcuda.so.1 of its own", "apt install --reinstall libcuda1" },
	{ "is too old", "on the host: apt install nvidia-driver (release 470 or newer), reboot",
	  "apt install nvidia-driver (release 470 or newer), reboot" },
	{ "shows no GPU", "docker run --gpus all, without CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES (systemctl edit dcpd)" },
	{ "error 100", "docker run --gpus all; on the host: nvidia-smi -L", "nvidia-smi -L; then modprobe nvidia_uvm" },
	{ "error 802", "on the host: systemctl restart nvidia-fabricmanager", "systemctl restart nvidia-fabricmanager" },
	{ "error 803", "start the container anew, in an image without a libcuda.so.1 of its own",
	  "reboot: the kernel's module is of another release than libcuda.so.1" },
	{ "error 804", "docker run -e NVIDIA_DISABLE_REQUIRE=1, in an image of an older CUDA",
	  "apt remove cuda-compat: this GPU works with its own driver's libcuda.so.1 only" },
	{ "", "on the host: nvidia-smi; dmesg | grep -e NVRM -e Xid", "nvidia-smi; dmesg | grep -e NVRM -e Xid" },
};

static const char *mend_of(const struct doctor_host *h, const char *reason)
{
	size_t i = 0;

	while (!strstr(reason, mends[i].part))
		i++;
	return doctor_in_container(h) ? mends[i].container : mends[i].host;
}

/* The kernel has the driver, and this process its device files. If not, the row nvidia_driver says what is to be done. */
static bool has_driver(const struct doctor_host *h)
{
	struct doctor_finding f;

	for (uint32_t i = 0; doctor_look(i, h, &f); i++)
		if (strcmp(f.name, "nvidia_driver") == 0)
			return f.state == DOCTOR_OK;
	return false;
}

void doctor_drivers_say(const struct doctor_host *h, const struct doctor_heard *heard, struct doctor_finding out[DOCTOR_DRIVERS])
{
	struct doctor_finding *cuda = &out[0], *nccl = &out[1];

	*cuda = (struct doctor_finding){ .name = "cuda" };
	*nccl = (struct doctor_finding){ .name = "nccl" };
	if (!heard->no_cuda && heard->gpu_problem)
		doctor_say(cuda, DOCTOR_WARN, mend_of(h, heard->gpu_problem), "the driver answers, but not every GPU: %.300s",
			   heard->gpu_problem);
	else if (!heard->no_cuda)
		doctor_say(cuda, DOCTOR_OK, "", "the driver answers");
	else if (heard->is_pending || !has_driver(h))
		doctor_say(cuda, DOCTOR_IDLE, "", "%.380s", heard->no_cuda);
	else
		doctor_say(cuda, DOCTOR_WARN, mend_of(h, heard->no_cuda), "no GPU can be used, though the kernel has NVIDIA's driver: "
			   "%.300s", heard->no_cuda);
	if (!heard->no_nccl)
		doctor_say(nccl, DOCTOR_OK, "", "NCCL %s", heard->nccl_version ? heard->nccl_version : "of an unknown version");
	else if (heard->no_cuda)
		doctor_say(nccl, DOCTOR_IDLE, "", heard->is_pending ? "%.380s" : "not needed without a GPU", heard->no_nccl);
	else
		doctor_say(nccl, DOCTOR_WARN, "apt install libnccl2 (from NVIDIA's repository), and start dcpd again", "%.300s: GPUs "
			   "exchange bytes through host memory", heard->no_nccl);
}

/* ---- a probe of one's own ---- */

static FALLIBLE enum err hear(int control_fd, json_t **hello_out)
{
	char greeting[128];
	int64_t end = clock_mono_ms() + PROBE_MS, left = PROBE_MS;
	struct frame_conn *conn;
	struct frame f;
	bool got = false, closed = false;

	snprintf(greeting, sizeof greeting, "{\"build_id\":\"%s\",\"role\":\"probe\"}", BUILD_ID);
	TRY(frame_conn_new(control_fd, &conn));
	enum err e = frame_send(conn, FRAME_HELLO, 0, str_of(greeting), NULL, 0);
	while (!e && !got && !closed && left > 0) {
		e = frame_wait(conn, (int)left, &f, &got, &closed);
		left = end - clock_mono_ms();
	}
	if (!e && !got)
		e = closed ? ERR(WORKER_LOST, "it ended in the driver")
			   : ERR(TIMED_OUT, "the driver has not answered for %d s", PROBE_MS / 1000);
	e = e ?: jtext_parse(f.json, 0, hello_out);
	struct err_info info = *err_last();
	frame_conn_free(conn);
	if (e)
		err_restore(&info);
	return e;
}

static FALLIBLE enum err probe(const struct doctor_host *h, json_t **hello_out)
{
	char fd_text[16];
	char *argv[] = { (char *)h->config->worker_path, (char *)"--control-fd", fd_text, NULL };
	struct spawn_spec how = { .path = h->config->worker_path, .argv = argv, .log_fd = -1 };
	struct spawn_child child = SPAWN_NONE;
	struct spawn_exit exit;
	bool ended;

	snprintf(fd_text, sizeof fd_text, "%d", SPAWN_CONTROL_FD);
	TRY(spawn_start(&how, &child));
	enum err e = hear(child.control_fd, hello_out);
	struct err_info info = *err_last();
	(void)!spawn_kill(child.pidfd, SIGKILL);
	(void)!spawn_reap(child.pidfd, END_MS, &ended, &exit); /* a driver may hold it in the kernel: it is not waited for */
	spawn_release(&child);
	if (e)
		err_restore(&info);
	return e;
}

static const char *reason_of(const json_t *backend)
{
	const char *reason = json_string_value(json_object_get(backend, "reason"));

	return json_is_true(json_object_get(backend, "available")) ? NULL : reason ? reason : "the probe did not say why";
}

const char *doctor_gpu_problem(const json_t *found)
{
	const json_t *one;
	size_t i;

	json_array_foreach(found, i, one)
		if (json_object_get(one, "problem"))
			return json_string_value(json_object_get(one, "problem"));
	return NULL;
}

void doctor_drivers_ask(const struct doctor_host *h, struct doctor_finding out[DOCTOR_DRIVERS])
{
	CLEANUP(json_decrefp) json_t *hello = NULL;
	char failed[DOCTOR_WORDS_MAX];
	struct doctor_heard heard = { .no_cuda = failed, .no_nccl = failed };

	if (probe(h, &hello) != OK) {
		snprintf(failed, sizeof failed, "the probe failed: %.300s", err_last()->text);
	} else {
		const json_t *backends = json_object_get(hello, "backends"), *nccl = json_object_get(backends, "nccl");
		heard = (struct doctor_heard){ .no_cuda = reason_of(json_object_get(backends, "cuda")), .no_nccl = reason_of(nccl),
					       .gpu_problem = doctor_gpu_problem(json_object_get(hello, "devices")),
					       .nccl_version = json_string_value(json_object_get(nccl, "version")) };
	}
	doctor_drivers_say(h, &heard, out);
}
