/* test_fault_points.c: fault points do what DCPD_FAULT says (os/fs.h). They are in builds with FAULTS=1 only, and so is this test. */
#include "lib/t.h"

#include <fcntl.h>
#include <stdlib.h>

#include "lib/t_dir.h"
#include "os/fs.h"

static void calls_fail_as_they_were_told(void **state)
{
	struct t_dir root;
	int fd;

	(void)state;
	t_dir_make(&root);
	fs_fault("test.point");
	T_OK(fs_open(root.fd, "f", O_RDWR | O_CREAT, 0600, &fd));
	fs_fault("test.point");
	T_ERR(STORAGE_FULL, fs_fsync(fd, "f"));
	T_OK(fs_fsync(fd, "f"));
	T_ERR(STORAGE_IO, fs_mkdir(root.fd, "d", 0700));
	T_ERR(STORAGE_IO, fs_mkdir(root.fd, "d", 0700));
	fs_drop(&fd);
	t_dir_remove(&root);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(calls_fail_as_they_were_told) };

	setenv("DCPD_FAULT", "test.point:2:ENOSPC,fs.mkdir:1+:EIO", 1); /* read once, at the first point */
	return cmocka_run_group_tests_name("fault points", tests, NULL, NULL);
}
