/* t_fakes.h: a test over the fake libcuda and libnccl, or over the real ones with DCPD_TEST_GPU=1 (make check-gpu).
 *
 *     int main(int argc, char **argv)
 *     {
 *             t_fakes_use(argv);               runs the program again with LD_LIBRARY_PATH, which is read once at start
 *
 * A driver is opened once in a process and must not be inherited: each case is a process of its own, t_fakes_run(fn, arg). */
#pragma once
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "lib/t.h"

enum { T_NO_GPU = 77 }; /* a case that ends so could not be tried here: the test is skipped, not passed */

static inline bool t_gpu(void)
{
	return getenv("DCPD_TEST_GPU") != NULL;
}

static inline void t_fakes_use(char **argv)
{
	char self[4096], dir[4200];
	ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);

	if (n <= 0 || t_gpu() || getenv("DCPD_TEST_FAKES"))
		return;
	self[n] = '\0';
	*strrchr(self, '/') = '\0'; /* build/test/VARIANT/test_x; the fakes are one for all variants */
	*strrchr(self, '/') = '\0';
	snprintf(dir, sizeof dir, "%s/fakes", self);
	setenv("LD_LIBRARY_PATH", dir, 1);
	setenv("DCPD_TEST_FAKES", dir, 1);
	execv("/proc/self/exe", argv);
	abort();
}

/* Runs fn in a process of its own; a failure in there ends it with its message on standard error. */
static inline pid_t t_fakes_start(void (*fn)(void *arg), void *arg)
{
	fflush(NULL);
	pid_t pid = fork();

	assert_true(pid >= 0);
	if (pid == 0) {
		alarm(T_HUNG_MS / 1000);
		fn(arg);
		_exit(0);
	}
	return pid;
}

static inline void t_fakes_end(pid_t pid)
{
	int status = 0;

	assert_int_equal(waitpid(pid, &status, 0), pid);
	if (WIFEXITED(status) && WEXITSTATUS(status) == T_NO_GPU)
		skip();
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		T_FAIL("the process of this case ended with status %#x", (unsigned)status);
}

static inline void t_fakes_run(void (*fn)(void *arg), void *arg)
{
	t_fakes_end(t_fakes_start(fn, arg));
}

/* For such a process, where cmocka's own would jump into the parent's test. */
#define C_TRUE(cond)                                                                              \
	do {                                                                                      \
		if (!(cond)) {                                                                    \
			fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #cond);      \
			_exit(1);                                                                 \
		}                                                                                 \
	} while (0)
#define C_OK(call) C_ERR_IS(OK, call)
#define C_ERR(code, call) C_ERR_IS(ERR_##code, call)
#define C_ERR_IS(want, call)                                                                              \
	do {                                                                                              \
		enum err c_e_ = (call);                                                                   \
		if (c_e_ != (want)) {                                                                     \
			fprintf(stderr, "%s:%d: %s: got %s (%s)\n", __FILE__, __LINE__, #call,            \
				c_e_ ? err_code_name(c_e_) : "OK", c_e_ ? err_last()->text : "");         \
			_exit(1);                                                                         \
		}                                                                                         \
	} while (0)
#define C_TEXT(part)                                                                                                  \
	do {                                                                                                          \
		if (!strstr(err_last()->text, part)) {                                                                \
			fprintf(stderr, "%s:%d: '%s' is not in '%s'\n", __FILE__, __LINE__, part, err_last()->text);  \
			_exit(1);                                                                                     \
		}                                                                                                     \
	} while (0)
