/* fs_fault.c: fault points for tests (see fs.h). Ordinary builds hold nothing but two empty functions.
 *
 * In the product's own calls instead of around it (LD_PRELOAD, ptrace), because neither sees what io_uring does, and because a
 * name like "commit.rename" stays right when the calls around it change. */
#include "os/fs_impl.h"

#ifdef DCPD_FAULTS

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { FAULTS_MAX = 16 };

struct fault {
	char point[64];
	uint64_t nth;
	bool onwards;
	int fails_with;        /* 0: SIGKILL */
	_Atomic uint64_t passes;
};

/* A fault for all processes stands in a file that a test writes while they run: tests/lib/faults.py. */
enum { REMOTE_IDLE, REMOTE_ARMED, REMOTE_STRUCK, HOLD_MS = 5000 };
struct remote {
	_Atomic uint32_t state;
	_Atomic int32_t left;  /* passes, this one included, until it strikes */
	int32_t fails_with;    /* errno; 0: SIGKILL; -1: waits until the state is another one */
	uint32_t onwards;      /* each later pass fails, too */
	char point[56];        /* empty: any */
	char struck[56];
};

static struct remote *remote;
static struct fault faults[FAULTS_MAX];
static unsigned fault_count;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local int pending;

static int errno_of(const char *name)
{
	for (int e = 1; e < 134; e++) {
		const char *known = strerrorname_np(e);
		if (known && strcmp(known, name) == 0)
			return e;
	}
	return -1;
}

/* A test with a fault that means nothing must not pass. */
static void parse_one(const char *spec, size_t n)
{
	char text[128], error[32] = "", plus[2] = "";
	struct fault *f = &faults[fault_count];
	unsigned long nth = 0;

	must(n < sizeof text && fault_count < FAULTS_MAX);
	memcpy(text, spec, n);
	text[n] = '\0';
	int got = sscanf(text, "%63[^:]:%lu%1[+]:%31s", f->point, &nth, plus, error);
	if (got < 3) {
		plus[0] = '\0';
		got = sscanf(text, "%63[^:]:%lu:%31s", f->point, &nth, error);
	}
	f->nth = nth;
	f->onwards = plus[0] == '+';
	f->fails_with = error[0] ? errno_of(error) : 0;
	if (got < 2 || nth == 0 || f->fails_with < 0) {
		fprintf(stderr, "DCPD_FAULT: '%s' is not POINT:N or POINT:N[+]:ERRNO\n", text);
		abort();
	}
	fault_count++;
}

static void parse(void)
{
	const char *p = getenv("DCPD_FAULT");

	while (p && *p && *p != '@') {
		size_t n = strcspn(p, ",");
		parse_one(p, n);
		p += n + (p[n] == ',');
	}
}

/* Mapped before the sandbox closes. */
__attribute__((constructor)) static void map_remote(void)
{
	const char *p = getenv("DCPD_FAULT");
	int fd = p && *p == '@' ? open(p + 1, O_RDWR | O_CLOEXEC) : -1;

	if (fd < 0)
		return;
	void *at = mmap(NULL, sizeof *remote, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	must(at != MAP_FAILED);
	remote = at;
	close(fd);
}

static void hold_here(void)
{
	for (int i = 0; i < HOLD_MS && remote->state == REMOTE_STRUCK; i++)
		nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
}

static int remote_errno(const char *point)
{
	if (remote->state == REMOTE_IDLE || (remote->point[0] && strcmp(remote->point, point) != 0))
		return 0;
	if (remote->state == REMOTE_ARMED) {
		if (atomic_fetch_sub(&remote->left, 1) != 1)
			return 0;
		snprintf(remote->struck, sizeof remote->struck, "%s", point);
		remote->state = REMOTE_STRUCK;
	} else if (!remote->onwards) {
		return 0;
	}
	if (remote->fails_with == 0) {
		kill(getpid(), SIGKILL);
		pause();
	}
	if (remote->fails_with < 0)
		hold_here();
	return remote->fails_with < 0 ? 0 : remote->fails_with;
}

int fs_fault_errno(const char *point)
{
	int e = remote ? remote_errno(point) : 0;

	if (e)
		return e;
	pthread_once(&once, parse);
	for (unsigned i = 0; i < fault_count; i++) {
		struct fault *f = &faults[i];
		if (strcmp(f->point, point) != 0)
			continue;
		uint64_t pass = atomic_fetch_add(&f->passes, 1) + 1;
		if (pass != f->nth && !(f->onwards && pass > f->nth))
			continue;
		if (f->fails_with)
			return f->fails_with;
		kill(getpid(), SIGKILL);
		pause();
	}
	return 0;
}

int fs_fault_pending(const char *point)
{
	int e = pending ? pending : fs_fault_errno(point);

	pending = 0;
	return e;
}

void fs_fault(const char *point)
{
	int e = fs_fault_errno(point);

	if (e)
		pending = e;
}

#else

void fs_fault(const char *point) { (void)point; }
int fs_fault_errno(const char *point) { (void)point; return 0; }

#endif
