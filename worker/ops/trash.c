/* trash.c: see trash.h. One thread per removal: they are rare, and a worker does one job at a time. */
#include "ops/trash.h"

#include <fcntl.h>
#include <pthread.h>
#include <string.h>

#include "base/mem.h"
#include "os/fs.h"

struct removal {
	int dirfd;
	char name[256];
};

static void *remove_it(void *user)
{
	struct removal *r = user;

	if (fs_remove_tree(r->dirfd, r->name) == OK && fs_fsync(r->dirfd, ".") != OK)
		err_clear(); /* gone or not after a power cut: it is trash either way */
	fs_drop(&r->dirfd);
	mem_free(r);
	return NULL;
}

static bool start(struct removal *r)
{
	pthread_attr_t attr;
	pthread_t thread;

	if (pthread_attr_init(&attr) != 0)
		return false;
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	int rc = pthread_create(&thread, &attr, remove_it, r);
	pthread_attr_destroy(&attr);
	return rc == 0;
}

enum err trash_remove(int dirfd, const char *name)
{
	struct removal *r = mem_zalloc(1, sizeof *r);

	if (!r || strlen(name) >= sizeof r->name) {
		mem_free(r);
		return fs_remove_tree(dirfd, name);
	}
	memcpy(r->name, name, strlen(name) + 1);
	r->dirfd = fcntl(dirfd, F_DUPFD_CLOEXEC, 0);
	if (r->dirfd >= 0 && start(r))
		return OK;
	fs_drop(&r->dirfd);
	mem_free(r);
	return fs_remove_tree(dirfd, name);
}
