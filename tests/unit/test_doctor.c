/* test_doctor.c: rows about devices and places, on hosts made of a few files. What a real process can lack, tests/api/test_doctor.py takes
 * from a real dcpd. */
#include "lib/t.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/t_dir.h"
#include "server/doctor_drivers.h"

#define PCI "/sys/bus/pci/devices/0000:3b:00.0/"
static struct t_dir dir;
static struct config *config;

/* Makes a file of the host with its folders. */
static void put(const char *path, const char *text)
{
	char full[PATH_MAX];
	int n = snprintf(full, sizeof full, "%s%s", dir.path, path);

	assert_true(n > 0 && (size_t)n < sizeof full);
	for (char *p = full + strlen(dir.path) + 1; *p; p++)
		if (*p == '/') {
			*p = '\0';
			(void)mkdir(full, 0755);
			*p = '/';
		}
	FILE *f = fopen(full, "we");
	assert_non_null(f);
	assert_true(fputs(text, f) >= 0);
	assert_int_equal(fclose(f), 0);
}

static struct doctor_finding look(const char *name)
{
	struct doctor_host h = { config, dir.path };
	struct doctor_finding f;

	for (uint32_t i = 0; doctor_look(i, &h, &f); i++)
		if (strcmp(f.name, name) == 0)
			return f;
	fail_msg("there is no row %s", name);
	return f;
}

static void says(const char *name, enum doctor_state state, const char *words, const char *command)
{
	struct doctor_finding f = look(name);

	if (f.state != state || !strstr(f.words, words) || !strstr(f.command, command) || (!command[0] && f.command[0]))
		fail_msg("%s: %s, \"%s\", \"%s\"; expected %s, \"%s\", \"%s\"", name, doctor_state_names[f.state], f.words, f.command,
			 doctor_state_names[state], words, command);
}

static int begin(void **state)
{
	char *argv[] = { "dcpd", "--state-dir", "/nowhere", NULL };

	(void)state;
	unsetenv("container");
	unsetenv("NVIDIA_VISIBLE_DEVICES");
	t_dir_make(&dir);
	T_OK(config_load(3, argv, NULL, &config));
	return 0;
}

static int end(void **state)
{
	(void)state;
	config_free(config);
	t_dir_remove(&dir);
	return 0;
}

static void put_card(void)
{
	put(PCI "vendor", "0x10de\n");
	put(PCI "class", "0x030200\n");
	put(PCI "numa_node", "1\n");
	put(PCI "current_link_width", "16\n");
	put(PCI "max_link_width", "16\n");
}

static void test_host_without_a_gpu(void **state)
{
	(void)state;
	put("/sys/bus/pci/devices/0000:00:1f.0/vendor", "0x10de\n"); /* NVIDIA's, and no display */
	put("/sys/bus/pci/devices/0000:00:1f.0/class", "0x040300\n");
	put("/sys/bus/pci/devices/0000:00:02.0/vendor", "0x8086\n");
	put("/sys/bus/pci/devices/0000:00:02.0/class", "0x030000\n");
	says("nvidia_driver", DOCTOR_IDLE, "no NVIDIA GPU", "");
	says("pci", DOCTOR_IDLE, "no NVIDIA GPU", "");
	says("container_toolkit", DOCTOR_IDLE, "no NVIDIA driver", "");
	says("shm", DOCTOR_BAD, "there is no /dev/shm", "mount -t tmpfs");
	put("/dev/shm/x", "");
	says("shm", DOCTOR_BAD, "is no tmpfs", "mount -t tmpfs");
}

static void test_driver_and_toolkit(void **state)
{
	(void)state;
	put_card();
	says("nvidia_driver", DOCTOR_WARN, "1 NVIDIA GPU on the PCI bus", "apt install nvidia-driver firmware");
	put("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n");
	says("nvidia_driver", DOCTOR_WARN, "cannot see /dev/nvidiactl", "nvidia-modprobe");
	says("container_toolkit", DOCTOR_IDLE, "no container engine", "");
	put("/usr/bin/dockerd", "");
	says("container_toolkit", DOCTOR_WARN, "is not installed", "nvidia-ctk runtime configure");
	put("/usr/bin/nvidia-ctk", "");
	says("container_toolkit", DOCTOR_OK, "is installed", "");
	put("/.dockerenv", "");
	says("nvidia_driver", DOCTOR_WARN, "cannot see /dev/nvidiactl", "--gpus all");
	says("container_toolkit", DOCTOR_IDLE, "asked on the host", "");
	setenv("NVIDIA_VISIBLE_DEVICES", "all", 1);
	says("container_toolkit", DOCTOR_WARN, "none came into the container", "nvidia-container-toolkit");
	put("/dev/nvidiactl", "");
	says("container_toolkit", DOCTOR_IDLE, "asked on the host", "");
	says("nvidia_driver", DOCTOR_OK, "NVIDIA driver 550.54.15", "");
	put("/proc/driver/nvidia/version", "a line of another form\n");
	says("nvidia_driver", DOCTOR_OK, "NVIDIA driver a line", "");
}

/* Of a host whose row nvidia_driver is well, or not. */
static void drivers_say(const struct doctor_heard *heard, enum doctor_state cuda, const char *words, const char *command)
{
	struct doctor_host h = { config, dir.path };
	struct doctor_finding f[DOCTOR_DRIVERS];

	doctor_drivers_say(&h, heard, f);
	assert_string_equal(f[0].name, "cuda");
	assert_string_equal(f[1].name, "nccl");
	if (f[0].state != cuda || !strstr(f[0].words, words) || !strstr(f[0].command, command) || (!command[0] && f[0].command[0]))
		fail_msg("%s, \"%s\", \"%s\"; expected %s, \"%s\", \"%s\"", doctor_state_names[f[0].state], f[0].words, f[0].command,
			 doctor_state_names[cuda], words, command);
}

/* A reason as worker/device/cuda.c gives it, and what mends it outside of a container and inside. */
static const char *const no_library[][3] = {
	{ "libcuda.so.1 was not found: no NVIDIA driver is installed here", "apt install libcuda1", "NVIDIA_DRIVER_CAPABILITIES=compute" },
	{ "libcuda.so.1 cannot be loaded: invalid ELF header", "--reinstall libcuda1", "--gpus all" },
	{ "libcuda.so.1 lacks cuDeviceGetUuid_v2: the NVIDIA driver is too old", "release 470", "on the host: apt install nvidia-driver" },
	{ "the NVIDIA driver shows no GPU to this process", "unset CUDA_VISIBLE_DEVICES", "--gpus all" },
	{ "cuInit: no CUDA-capable device is detected (CUDA_ERROR_NO_DEVICE, error 100)", "nvidia-smi -L", "nvidia-smi -L" },
	{ "cuInit: system not yet initialized (CUDA_ERROR_SYSTEM_NOT_READY, error 802)", "nvidia-fabricmanager", "on the host: " },
	{ "cuInit: mismatch (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, error 803)", "reboot", "start the container anew" },
	{ "cuInit: forward compatibility (CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, error 804)", "cuda-compat", "an older CUDA" },
	{ "cuInit: unknown error (CUDA_ERROR_UNKNOWN, error 999)", "dmesg", "on the host: nvidia-smi" },
	{ "the probe failed: the worker was ended by signal 11", "dmesg", "on the host: nvidia-smi" },
};

static void test_a_driver_whose_library_does_not_answer(void **state)
{
	const char *idle[] = { "no NVIDIA driver", "not yet known: the probe has not answered" };
	struct doctor_heard none = { .no_cuda = idle[0], .no_nccl = idle[0] };
	struct doctor_heard pending = { .no_cuda = idle[1], .no_nccl = idle[1], .is_pending = true };

	(void)state;
	drivers_say(&none, DOCTOR_IDLE, idle[0], ""); /* of no concern without the kernel's driver */
	put("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n");
	drivers_say(&none, DOCTOR_IDLE, idle[0], ""); /* the row nvidia_driver says what to do first */
	put("/dev/nvidiactl", "");
	drivers_say(&pending, DOCTOR_IDLE, idle[1], "");
	drivers_say(&(struct doctor_heard){ .nccl_version = "2.28.9" }, DOCTOR_OK, "the driver answers", "");
	drivers_say(&(struct doctor_heard){ .gpu_problem = "cuDeviceGetName: GPU is lost (error 999)" }, DOCTOR_WARN,
		    "the driver answers, but not every GPU: cuDeviceGetName", "grep -e NVRM -e Xid");
	for (int inside = 0; inside < 2; inside++) {
		for (size_t i = 0; i < sizeof no_library / sizeof *no_library; i++) {
			struct doctor_heard heard = { .no_cuda = no_library[i][0], .no_nccl = no_library[i][0] };
			drivers_say(&heard, DOCTOR_WARN, no_library[i][0], no_library[i][1 + inside]);
		}
		put("/.dockerenv", "");
	}
}

static void test_places(void **state)
{
	(void)state;
	put_card();
	put("/sys/devices/system/node/node0/cpulist", "0-7\n");
	says("numa", DOCTOR_OK, "one NUMA node", "");
	put("/sys/devices/system/node/node1/cpulist", "8-15\n");
	says("numa", DOCTOR_OK, "2 NUMA nodes; 0000:3b:00.0 on node 1", "");
	put(PCI "numa_node", "-1\n");
	says("numa", DOCTOR_WARN, "0000:3b:00.0 on no known node", "firmware");
	says("pci", DOCTOR_OK, "1 GPU, with all", "");
	put(PCI "current_link_width", "8\n");
	says("pci", DOCTOR_WARN, "GPU 0000:3b:00.0 has 8 of its 16", "lspci -vv -s 0000:3b:00.0");
	put(PCI "max_link_width", "no number\n");
	says("pci", DOCTOR_OK, "1 GPU", "");
}

static void test_limits(void **state)
{
	(void)state;
	put("/proc/self/status", "Name:\tdcpd\nCapEff:\t0000000000000000\n");
	config->job_memory = UINT64_MAX;
	struct doctor_finding f = look("memlock");
	assert_true(f.state == DOCTOR_OK || strstr(f.command, "LimitMEMLOCK=infinity"));
	put("/proc/self/status", "Name:\tdcpd\nCapEff:\t0000000000004000\n"); /* CAP_IPC_LOCK */
	says("memlock", DOCTOR_OK, "without limit", "");
}

static void test_every_row_has_words_and_a_way_out(void **state)
{
	struct doctor_host h = { config, dir.path };
	struct doctor_finding f;
	struct buf b = BUF_INIT(1 << 16);

	(void)state;
	for (uint32_t i = 0; doctor_look(i, &h, &f); i++) {
		assert_true(f.name[0] && f.words[0]);
		assert_true(f.state == DOCTOR_OK || f.state == DOCTOR_IDLE ? !f.command[0] : f.command[0] != '\0');
		assert_true(strlen(f.words) < sizeof f.words - 1 && strlen(f.command) < sizeof f.command - 1);
		doctor_put(&f, &b);
	}
	T_OK(buf_status(&b));
	buf_free(&b);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_host_without_a_gpu, begin, end),
		cmocka_unit_test_setup_teardown(test_driver_and_toolkit, begin, end),
		cmocka_unit_test_setup_teardown(test_a_driver_whose_library_does_not_answer, begin, end),
		cmocka_unit_test_setup_teardown(test_places, begin, end),
		cmocka_unit_test_setup_teardown(test_limits, begin, end),
		cmocka_unit_test_setup_teardown(test_every_row_has_words_and_a_way_out, begin, end),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
