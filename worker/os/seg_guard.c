/* seg_guard.c: a peer that shrinks a mapped segment must not kill us (see seg.h).
 *
 * Touching a page that is gone raises SIGBUS in the thread that touches it. Inside a guard the handler jumps out; outside it
 * steps aside. SA_NODEFER and a jump that saves no mask make the guard nearly free; the price is that fn may hold nothing that
 * has to be given back. */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "os/seg.h"

/* The thread sanitizer runs handlers with all signals blocked, so there the mask has to be put back. */
#ifdef __SANITIZE_THREAD__
enum { SAVE_MASK = 1 };
#else
enum { SAVE_MASK = 0 };
#endif

static _Thread_local sigjmp_buf way_out;
static _Thread_local volatile sig_atomic_t guarded;
static pthread_mutex_t install_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction before;

static void on_sigbus(int signo, siginfo_t *info, void *)
{
	if (guarded && info->si_code > 0) {
		guarded = 0;
		siglongjmp(way_out, 1);
	}
	/* Not ours: the same access faults again and meets the earlier handler. A signal that was sent is sent again. */
	sigaction(SIGBUS, &before, NULL);
	if (info->si_code <= 0)
		raise(signo);
}

static bool installed(struct sigaction *now_out)
{
	return sigaction(SIGBUS, NULL, now_out) == 0 && (now_out->sa_flags & SA_SIGINFO) &&
	       now_out->sa_sigaction == on_sigbus;
}

/* Asked each time: a library that puts its own handler in later would take the guard away silently. */
static FALLIBLE enum err ensure_handler(void)
{
	struct sigaction now, ours = { .sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK };
	int bad = 0;

	if (installed(&now))
		return OK;
	pthread_mutex_lock(&install_lock);
	if (!installed(&now)) {
		before = now;
		sigemptyset(&ours.sa_mask);
		bad = sigaction(SIGBUS, &ours, NULL);
	}
	pthread_mutex_unlock(&install_lock);
	return bad < 0 ? ERR_SYS(SYSTEM, "cannot install the SIGBUS handler") : OK;
}

enum err seg_guard(void (*fn)(void *user), void *user)
{
	sigjmp_buf outer;
	const bool nested = guarded;

	TRY(ensure_handler());
	if (nested)
		memcpy(&outer, &way_out, sizeof outer);
	if (sigsetjmp(way_out, SAVE_MASK) != 0) {
		if (nested)
			memcpy(&way_out, &outer, sizeof outer);
		guarded = nested;
		return ERR(SEGMENT_SHRUNK, "the segment became smaller while it was used");
	}
	guarded = 1;
	fn(user);
	if (nested)
		memcpy(&way_out, &outer, sizeof outer);
	guarded = nested;
	return OK;
}
