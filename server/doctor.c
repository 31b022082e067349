/* doctor.c: see doctor.h. */
#include "server/doctor.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <linux/landlock.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/timex.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/num.h"
#include "os/fs.h"

enum { SHM_LITTLE = 1 << 30, SHM_RING = 64 << 20, FILES_WANTED = 65536, FILES_LEAST = 256, TMPFS = 0x01021994,
       CAPABILITY_IPC_LOCK = 14, YEAR_2025_S = 1735689600, TEXT = 256, CARDS_MAX = 64 };

const char *const doctor_state_names[] = { "ok", "idle", "warn", "bad" };

void doctor_say(struct doctor_finding *f, enum doctor_state state, const char *command, const char *words, ...)
{
	va_list ap;

	va_start(ap, words);
	vsnprintf(f->words, sizeof f->words, words, ap);
	va_end(ap);
	f->state = state;
	snprintf(f->command, sizeof f->command, "%s", command);
}

/* ---- what the host's files say ---- */

/* Reads a small file's first line. False: it is not there, or empty. */
static bool read_line(const struct doctor_host *h, char out[TEXT], const char *path, ...) PRINTF_LIKE(3, 4);
static bool read_line(const struct doctor_host *h, char out[TEXT], const char *path, ...)
{
	char name[CONFIG_PATH_MAX], full[CONFIG_PATH_MAX * 2];
	va_list ap;

	va_start(ap, path);
	vsnprintf(name, sizeof name, path, ap);
	va_end(ap);
	snprintf(full, sizeof full, "%s%s", h->root, name);
	FILE *f = fopen(full, "re");
	if (!f)
		return false;
	bool some = fgets(out, TEXT, f) != NULL;
	fclose(f);
	if (some)
		out[strcspn(out, "\n")] = '\0';
	return some && out[0];
}

static bool read_number(const struct doctor_host *h, const char *path, uint64_t *out)
{
	char text[TEXT];

	return read_line(h, text, "%s", path) && str_to_u64(str_of(text), out);
}

static bool is_there(const struct doctor_host *h, const char *path)
{
	char full[CONFIG_PATH_MAX * 2];

	snprintf(full, sizeof full, "%s%s", h->root, path);
	return access(full, F_OK) == 0;
}

bool doctor_in_container(const struct doctor_host *h)
{
	return is_there(h, "/.dockerenv") || is_there(h, "/run/.containerenv") || getenv("container");
}

static bool has_program(const struct doctor_host *h, const char *name)
{
	static const char *const folders[] = { "/usr/bin", "/usr/local/bin", "/usr/sbin", "/bin" };
	char path[TEXT];

	for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
		snprintf(path, sizeof path, "%s/%s", folders[i], name);
		if (is_there(h, path))
			return true;
	}
	return false;
}

static double gib(uint64_t bytes)
{
	return (double)bytes / (1 << 30);
}

/* ---- memory ---- */

static const char *larger_shm(const struct doctor_host *h)
{
	return doctor_in_container(h) ? "docker run --shm-size=64g (Compose: DCPD_SHM_SIZE=64gb in .env; Kubernetes: sizeLimit of the "
					"volume shm)"
			       : "mount -o remount,size=80% /dev/shm";
}

static void look_shm(const struct doctor_host *h, struct doctor_finding *f)
{
	char path[CONFIG_PATH_MAX];
	struct statfs s;

	snprintf(path, sizeof path, "%s/dev/shm", h->root);
	if (statfs(path, &s) != 0) {
		doctor_say(f, DOCTOR_BAD, "mount -t tmpfs -o mode=1777,size=80% tmpfs /dev/shm", "there is no /dev/shm (%s): nothing can "
			   "be saved from memory", strerror(errno));
		return;
	}
	uint64_t total = (uint64_t)s.f_blocks * (uint64_t)s.f_bsize, unused = (uint64_t)s.f_bavail * (uint64_t)s.f_bsize;
	if (s.f_type != TMPFS)
		doctor_say(f, DOCTOR_BAD, "mount -t tmpfs -o mode=1777,size=80% tmpfs /dev/shm", "/dev/shm is no tmpfs: snapshots would "
			   "lie on a disk");
	else if (access(path, W_OK | X_OK) != 0)
		doctor_say(f, DOCTOR_BAD, "chmod 1777 /dev/shm", "/dev/shm cannot be written to by uid %u (%s)", (unsigned)geteuid(),
			   strerror(errno));
	else if (total < SHM_RING)
		doctor_say(f, DOCTOR_BAD, larger_shm(h), "/dev/shm has %.0f MiB: a save needs 64", gib(total) * 1024);
	else if (total < SHM_LITTLE)
		doctor_say(f, DOCTOR_WARN, larger_shm(h), "/dev/shm has %.0f MiB: enough for saves that block, of one trainer; a snapshot "
			   "needs the state dict's bytes, twice", gib(total) * 1024);
	else if (unused < total / 10)
		doctor_say(f, DOCTOR_WARN, "dcpctl ls shm: (what dcpd holds); ls -lS /dev/shm (what others do)", "/dev/shm is nearly full: "
			   "%.1f of %.1f GiB are free", gib(unused), gib(total));
	else
		doctor_say(f, DOCTOR_OK, "", "/dev/shm: %.1f of %.1f GiB are free", gib(unused), gib(total));
}

static void look_shm_xattr(const struct doctor_host *h, struct doctor_finding *f)
{
	char path[CONFIG_PATH_MAX];

	snprintf(path, sizeof path, "%s/dev/shm", h->root);
	int fd = open(path, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	if (fd < 0)
		doctor_say(f, DOCTOR_IDLE, "", "not known: no file can be made in /dev/shm (%s)", strerror(errno));
	else if (fsetxattr(fd, "user.dcpd", "1", 1, 0) != 0)
		doctor_say(f, DOCTOR_WARN, "boot Linux 6.6 or newer, with CONFIG_TMPFS_XATTR=y (Debian 12: apt install -t "
			"bookworm-backports "
			   "linux-image-amd64)", "tmpfs keeps no user attributes (%s): which daemon a left-over segment belongs to "
				"shows by its "
			   "age alone, so that it stays for longer", strerror(errno));
	else
		doctor_say(f, DOCTOR_OK, "", "tmpfs keeps user attributes: segments are marked with their daemon");
	if (fd >= 0)
		close(fd);
}

static const char *raised_limit(const struct doctor_host *h, const char *container, const char *unit)
{
	return doctor_in_container(h) ? container : unit;
}

/* A process with CAP_IPC_LOCK is not limited. */
static bool may_lock_all(const struct doctor_host *h)
{
	char path[CONFIG_PATH_MAX], line[TEXT];
	uint64_t caps = 0;

	snprintf(path, sizeof path, "%s/proc/self/status", h->root);
	FILE *f = fopen(path, "re");
	if (!f)
		return false;
	while (fgets(line, sizeof line, f))
		if (strncmp(line, "CapEff:", 7) == 0)
			caps = strtoull(line + 7, NULL, 16);
	fclose(f);
	return caps >> CAPABILITY_IPC_LOCK & 1;
}

static void look_memlock(const struct doctor_host *h, struct doctor_finding *f)
{
	struct rlimit r;

	if (getrlimit(RLIMIT_MEMLOCK, &r) != 0 || r.rlim_cur == RLIM_INFINITY || may_lock_all(h))
		doctor_say(f, DOCTOR_OK, "", "memory may be locked without limit");
	else if (r.rlim_cur < h->config->job_memory)
		doctor_say(f, DOCTOR_WARN, raised_limit(h, "docker run --ulimit memlock=-1 (Compose: ulimits: {memlock: -1})",
							"systemctl edit dcpd: [Service] LimitMEMLOCK=infinity; from a shell: ulimit -l "
								"unlimited"),
			   "only %.1f MiB of memory may be locked, a job's buffers are %.0f: copies from and to GPUs go through memory "
				"that is "
			   "not pinned, which is slower", gib(r.rlim_cur) * 1024, gib(h->config->job_memory) * 1024);
	else
		doctor_say(f, DOCTOR_OK, "", "%.0f MiB of memory may be locked", gib(r.rlim_cur) * 1024);
}

static void look_open_files(const struct doctor_host *h, struct doctor_finding *f)
{
	const char *more = raised_limit(h, "docker run --ulimit nofile=65536", "systemctl edit dcpd: [Service] LimitNOFILE=65536; from a "
					"shell: ulimit -Hn 65536");
	struct rlimit r;

	if (getrlimit(RLIMIT_NOFILE, &r) != 0 || r.rlim_max >= FILES_WANTED)
		doctor_say(f, DOCTOR_OK, "", "%ju files may be open", (uintmax_t)(r.rlim_max));
	else
		doctor_say(f, r.rlim_max < FILES_LEAST ? DOCTOR_BAD : DOCTOR_WARN, more, "only %ju files may be open: each rank's segment, "
			   "each client and each worker is one, so that large worlds are refused", (uintmax_t)r.rlim_max);
}

/* ---- the kernel ---- */

static void look_io_uring(const struct doctor_host *h, struct doctor_finding *f)
{
	struct io_uring_params p = { 0 };
	uint64_t off = 0;

	if (strcmp(h->config->io_engine, "threads") == 0) {
		doctor_say(f, DOCTOR_IDLE, "", "not used: io-engine is threads");
		return;
	}
	enum doctor_state state = strcmp(h->config->io_engine, "io_uring") == 0 ? DOCTOR_BAD : DOCTOR_WARN;
	int fd = (int)syscall(SYS_io_uring_setup, 1, &p);
	int why = errno;
	if (fd >= 0) {
		close(fd);
		doctor_say(f, DOCTOR_OK, "", "files are read and written by io_uring");
		return;
	}
	const char *command = "docker run --security-opt seccomp=FILE, a profile that allows it (deploy/README.md)";
	if (read_number(h, "/proc/sys/kernel/io_uring_disabled", &off) && off)
		command = "sysctl -w kernel.io_uring_disabled=0 (in /etc/sysctl.d/ for good)";
	else if (why == ENOSYS && !doctor_in_container(h))
		command = "boot a kernel with CONFIG_IO_URING=y";
	else if (why == ENOMEM)
		command = "systemctl edit dcpd: [Service] LimitMEMLOCK=infinity";
	doctor_say(f, state, command, "io_uring is refused (%s): %s", strerror(why), state == DOCTOR_BAD ? "io-engine asks for it, so that "
		   "no job can run" : "a pool of threads reads and writes, which costs more CPU time");
}

static void look_landlock(const struct doctor_host *h, struct doctor_finding *f)
{
	long abi = syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);
	char lsm[TEXT] = "";

	if (abi > 0) {
		doctor_say(f, DOCTOR_OK, "", "Landlock, version %ld: workers reach nothing but the storages", abi);
		return;
	}
	int why = errno;
	const char *command = "boot Linux 5.13 or newer, with CONFIG_SECURITY_LANDLOCK=y";
	if (why == EOPNOTSUPP)
		command = "add landlock to lsm= on the kernel's command line (GRUB_CMDLINE_LINUX in /etc/default/grub), update-grub, "
			"reboot";
	else if (why == EPERM || why == EACCES || doctor_in_container(h))
		command = "docker run --security-opt seccomp=FILE, a profile that allows it (deploy/README.md)";
	(void)read_line(h, lsm, "/sys/kernel/security/lsm");
	doctor_say(f, DOCTOR_WARN, command, "Landlock is refused (%s%s%s): workers are confined to the storages by a mount namespace, "
		"or, where "
		   "dcpd may make none, not at all", strerror(why), lsm[0] ? "; in use: " : "", lsm);
}

static void look_clock(const struct doctor_host *, struct doctor_finding *f)
{
	struct timex t = { .modes = 0 };
	int state = adjtimex(&t);

	if (clock_wall_ms() / 1000 < YEAR_2025_S)
		doctor_say(f, DOCTOR_BAD, "timedatectl set-ntp true", "the clock is years behind: certificates fail, and policies take "
			   "checkpoints for old or new that are not");
	else if (state < 0)
		doctor_say(f, DOCTOR_IDLE, "", "not known whether the clock is synchronised (%s)", strerror(errno));
	else if (state == TIME_ERROR || (t.status & STA_UNSYNC))
		doctor_say(f, DOCTOR_WARN, "timedatectl set-ntp true, or apt install chrony (on the host, not in a container)", "the "
			"clock is not "
			   "synchronised: the order of checkpoints and the age that policies go by are as wrong as it is");
	else
		doctor_say(f, DOCTOR_OK, "", "the clock is synchronised, to about %.1f ms", (double)t.esterror / 1000);
}

/* ---- GPUs, by the kernel's files: no driver is opened here, see devices.h ---- */

struct cards {
	uint32_t count;
	char place[CARDS_MAX][16];          /* "0000:3b:00.0" */
};

static bool is_card(const struct doctor_host *h, const char *place)
{
	char vendor[TEXT], kind[TEXT];

	return read_line(h, vendor, "/sys/bus/pci/devices/%s/vendor", place) && strcmp(vendor, "0x10de") == 0 &&
	       read_line(h, kind, "/sys/bus/pci/devices/%s/class", place) && strncmp(kind, "0x03", 4) == 0;
}

static struct cards find_cards(const struct doctor_host *h)
{
	char path[CONFIG_PATH_MAX];
	struct cards out = { 0 };
	const struct dirent *d;

	snprintf(path, sizeof path, "%s/sys/bus/pci/devices", h->root);
	DIR *dir = opendir(path);
	while (dir && out.count < CARDS_MAX && (d = readdir(dir)) != NULL)
		if (strlen(d->d_name) < sizeof out.place[0] && is_card(h, d->d_name))
			snprintf(out.place[out.count++], sizeof out.place[0], "%s", d->d_name);
	if (dir)
		closedir(dir);
	return out;
}

static void look_driver(const struct doctor_host *h, struct doctor_finding *f)
{
	uint32_t cards = find_cards(h).count;
	char version[TEXT] = "";
	bool loaded = read_line(h, version, "/proc/driver/nvidia/version");
	const char *number = loaded ? strstr(version, "Module") : NULL;
	size_t skip = number ? strcspn(number, "0123456789") : 0;

	if (!cards && !loaded)
		doctor_say(f, DOCTOR_IDLE, "", "no NVIDIA GPU is here: state dicts live in host memory");
	else if (!loaded)
		doctor_say(f, DOCTOR_WARN, doctor_in_container(h) ? "install the driver on the host: apt install nvidia-driver, reboot"
							   : "apt install nvidia-driver firmware-misc-nonfree, reboot (secure boot: "
								"sign the module)",
			   "%u NVIDIA GPU%s on the PCI bus, but no driver is loaded", cards, cards == 1 ? "" : "s");
	else if (!is_there(h, "/dev/nvidiactl"))
		doctor_say(f, DOCTOR_WARN, doctor_in_container(h) ? "docker run --gpus all (Compose: deploy.resources."
				"reservations.devices, driver: nvidia)" :
				"nvidia-modprobe -u -c=0; with systemd: DeviceAllow=char-nvidia* rw, "
					"PrivateDevices=no",
			   "the NVIDIA driver is loaded, but dcpd cannot see /dev/nvidiactl");
	else
		doctor_say(f, DOCTOR_OK, "", "NVIDIA driver %.*s", number ? (int)strcspn(number + skip, " ") : 64,
			   number ? number + skip : version);
}

static void look_toolkit(const struct doctor_host *h, struct doctor_finding *f)
{
	static const char install[] = "apt install nvidia-container-toolkit; nvidia-ctk runtime configure --runtime=docker; systemctl "
		"restart "
				      "docker";
	bool driver = is_there(h, "/proc/driver/nvidia/version"), engine = has_program(h, "dockerd") || has_program(h, "podman");
	const char *wish = getenv("NVIDIA_VISIBLE_DEVICES");

	if (doctor_in_container(h) && wish && wish[0] && strcmp(wish, "void") != 0 && strcmp(wish, "none") != 0 &&
	    !is_there(h, "/dev/nvidiactl"))
		doctor_say(f, DOCTOR_WARN, install, "NVIDIA_VISIBLE_DEVICES asks for GPUs, but none came into the container: its "
			"runtime is not "
			   "NVIDIA's");
	else if (doctor_in_container(h) || !driver || !engine)
		doctor_say(f, DOCTOR_IDLE, "", "%s", doctor_in_container(h) ? "asked on the host" : !driver ? "no NVIDIA driver is loaded"
												      : "no container engine is here");
	else if (!has_program(h, "nvidia-ctk") && !has_program(h, "nvidia-container-runtime"))
		doctor_say(f, DOCTOR_WARN, install, "the NVIDIA container toolkit is not installed: containers get no GPU");
	else
		doctor_say(f, DOCTOR_OK, "", "the NVIDIA container toolkit is installed");
}

static uint32_t count_nodes(const struct doctor_host *h)
{
	char path[TEXT];
	uint32_t n = 0;

	for (uint32_t i = 0; i < 1024; i++) {
		snprintf(path, sizeof path, "/sys/devices/system/node/node%u", i);
		n += is_there(h, path);
	}
	return n;
}

/* Appends ", 0000:3b:00.0 on node 1" for each card. False: of one the node is not known. */
static bool put_places(const struct doctor_host *h, const struct cards *cards, struct buf *out)
{
	char node[TEXT];
	bool all = true;

	for (uint32_t i = 0; i < cards->count; i++) {
		if (!read_line(h, node, "/sys/bus/pci/devices/%s/numa_node", cards->place[i]))
			snprintf(node, sizeof node, "-1");
		all = all && node[0] != '-';
		buf_printf(out, "%s%s on %s%s", i ? ", " : "; ", cards->place[i], node[0] == '-' ? "no known node" : "node ",
			   node[0] == '-' ? "" : node);
	}
	buf_putc(out, '\0');
	return all;
}

static void look_numa(const struct doctor_host *h, struct doctor_finding *f)
{
	CLEANUP(buf_free) struct buf places = BUF_INIT(1 << 16);
	struct cards cards = find_cards(h);
	uint32_t nodes = count_nodes(h);
	bool known = put_places(h, &cards, &places);
	const char *text = buf_status(&places) == OK ? (char *)places.p : "";

	if (nodes < 2)
		doctor_say(f, DOCTOR_OK, "", "one NUMA node: memory is equally near to all processors%s", text);
	else if (!known)
		doctor_say(f, DOCTOR_WARN, "set NUMA (NPS, SRAT) in the firmware; in a virtual machine: give it the GPU's node", "%u NUMA "
			   "nodes%s: threads cannot be placed near such a GPU", nodes, text);
	else
		doctor_say(f, DOCTOR_OK, "", "%u NUMA nodes%s", nodes, text);
}

/* Speed falls while a card rests, width does not. */
static void look_pci(const struct doctor_host *h, struct doctor_finding *f)
{
	struct cards cards = find_cards(h);
	char path[TEXT], command[TEXT];
	uint64_t now, most;

	if (cards.count == 0) {
		doctor_say(f, DOCTOR_IDLE, "", "no NVIDIA GPU is here");
		return;
	}
	for (uint32_t i = 0; i < cards.count; i++) {
		snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/current_link_width", cards.place[i]);
		bool known = read_number(h, path, &now);
		snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/max_link_width", cards.place[i]);
		if (!known || !read_number(h, path, &most) || now >= most)
			continue;
		snprintf(command, sizeof command, "lspci -vv -s %s | grep LnkSta (then seat the card anew, or use another "
			"slot)", cards.place[i]);
		doctor_say(f, DOCTOR_WARN, command, "GPU %s has %ju of its %ju PCI Express lanes: copies take as much longer",
			   cards.place[i], (uintmax_t)now, (uintmax_t)most);
		return;
	}
	doctor_say(f, DOCTOR_OK, "", "%u GPU%s, with all PCI Express lanes that %s", cards.count, cards.count == 1 ? "" : "s",
		   cards.count == 1 ? "it has" : "they have");
}

static const struct {
	const char *name;
	void (*look)(const struct doctor_host *h, struct doctor_finding *f);
} rows[] = {
	{ "shm", look_shm },
	{ "shm_xattr", look_shm_xattr },
	{ "memlock", look_memlock },
	{ "open_files", look_open_files },
	{ "io_uring", look_io_uring },
	{ "landlock", look_landlock },
	{ "clock", look_clock },
	{ "nvidia_driver", look_driver },
	{ "container_toolkit", look_toolkit },
	{ "numa", look_numa },
	{ "pci", look_pci },
};

bool doctor_look(uint32_t index, const struct doctor_host *host, struct doctor_finding *out)
{
	if (index >= sizeof rows / sizeof *rows)
		return false;
	*out = (struct doctor_finding){ .name = rows[index].name };
	rows[index].look(host, out);
	return true;
}

/* ---- showing it ---- */

void doctor_put(const struct doctor_finding *f, struct buf *out)
{
	buf_json_member(out, "{\"name\":", str_of(f->name));
	buf_json_member(out, ",\"state\":", str_of(doctor_state_names[f->state]));
	buf_json_member(out, ",\"words\":", str_of(f->words));
	buf_json_member(out, ",\"command\":", str_of(f->command));
	buf_putc(out, '}');
}

void doctor_self_test(const struct config *c)
{
	struct doctor_host h = { c, "" };
	struct doctor_finding f;
	char lacks[TEXT] = "";

	for (uint32_t i = 0; doctor_look(i, &h, &f); i++) {
		size_t n = strlen(lacks);
		if (f.state == DOCTOR_BAD)
			log_warn("self-test", "lacks", f.name, "words", f.words, "command", f.command, NULL);
		else if (f.state == DOCTOR_WARN)
			snprintf(lacks + n, sizeof lacks - n, "%s%s", n ? ", " : "", f.name);
	}
	if (lacks[0])
		log_info("self-test", "lacks", lacks, "advice", "dcpctl doctor", NULL);
}
