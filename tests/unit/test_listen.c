/* test_listen.c: addresses, taken ports, and the left-over file of a Unix socket. */
#include "lib/t.h"

#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "api/listen.h"
#include "lib/t_dir.h"

static const gid_t none = (gid_t)-1;

static void test_addresses(void **state)
{
	static const char *const bad[] = { "", "x", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", ":80", "-1", "unix:",
					   "no.such.host.invalid:1" };
	struct http_listener l = { .fd = -1 };

	(void)state;
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		T_ERR(CONFIG, listen_open(bad[i], false, false, none, &l));
		T_ERR(CONFIG, listen_check(bad[i], false, false));
	}
	T_OK(listen_check("0", false, false));
	T_OK(listen_check("unix:/run/x", false, false));
	T_ERR(CONFIG, listen_check("0.0.0.0:0", false, false));
	T_OK(listen_check("0.0.0.0:0", false, true));
	T_ERR(CONFIG, listen_open("0.0.0.0:0", false, false, none, &l));
	assert_non_null(strstr(err_last()->text, "insecure-http"));
	T_OK(listen_open("0.0.0.0:0", false, true, none, &l));
	listen_close(&l);
	T_OK(listen_open("0.0.0.0:0", true, false, none, &l));
	assert_true(strncmp(l.url, "https://0.0.0.0:", 16) == 0);
	listen_close(&l);
}

static void test_taken_port(void **state)
{
	struct http_listener a, b;
	char address[300];

	(void)state;
	T_OK(listen_open("0", false, false, none, &a));
	assert_true(strncmp(a.url, "http://127.0.0.1:", 17) == 0 && strcmp(a.url + 17, "0") != 0);
	snprintf(address, sizeof address, "%s", a.url + 7);
	T_ERR(CONFIG, listen_open(address, false, false, none, &b));
	assert_non_null(strstr(err_last()->text, "in use"));
	listen_close(&a);
	T_OK(listen_open(address, false, false, none, &b));
	listen_close(&b);
}

static void test_unix_socket(void **state)
{
	struct http_listener a, b;
	char address[300], long_path[200];
	struct t_dir dir;
	int file;
	struct stat st;

	(void)state;
	t_dir_make(&dir);
	snprintf(address, sizeof address, "unix:%s/x.sock", dir.path);
	T_OK(listen_open(address, false, false, none, &a));
	assert_true(a.is_unix && stat(address + 5, &st) == 0 && S_ISSOCK(st.st_mode));
	assert_int_equal(st.st_mode & 0777, 0600);
	T_ERR(CONFIG, listen_open(address, false, false, none, &b));
	assert_non_null(strstr(err_last()->text, "another daemon"));
	/* The file of a daemon that died is taken over. */
	close(a.fd);
	T_OK(listen_open(address, false, false, none, &b));
	listen_close(&b);
	assert_int_equal(stat(address + 5, &st), -1);
	memset(long_path, 'x', sizeof long_path);
	memcpy(long_path, "unix:/", 6);
	long_path[sizeof long_path - 1] = '\0';
	T_ERR(CONFIG, listen_open(long_path, false, false, none, &a));
	/* A file that is no socket is not ours to remove. */
	snprintf(address, sizeof address, "unix:%s/file", dir.path);
	file = open(address + 5, O_CREAT | O_WRONLY, 0600);
	assert_true(file >= 0);
	close(file);
	T_ERR(CONFIG, listen_open(address, false, false, none, &a));
	assert_int_equal(stat(address + 5, &st), 0);
	t_dir_remove(&dir);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_addresses),
		cmocka_unit_test(test_taken_port),
		cmocka_unit_test(test_unix_socket),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
