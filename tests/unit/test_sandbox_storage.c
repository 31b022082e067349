/* The sandbox of a worker that has an object storage: it connects to that one's port, resolves names, reads its credentials, and no more.
 * Each question is put by a process of its own, which enters the sandbox first. */
#include "lib/t.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lib/t_dir.h"
#include "os/sandbox.h"

static struct t_dir root;
static struct sandbox_done entered;
static uint16_t its_port, other_port;
static int listeners[2];

static int listen_on(uint16_t *port_out)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t n = sizeof at;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	assert_true(fd >= 0 && bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && listen(fd, 8) == 0);
	assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &n), 0);
	*port_out = ntohs(at.sin_port);
	return fd;
}

static long connect_to(uint16_t port)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(port) };

	return connect(socket(AF_INET, SOCK_STREAM, 0), (struct sockaddr *)&at, sizeof at);
}

static long its_storage(void)
{
	return connect_to(its_port);
}

static long another_port(void)
{
	return connect_to(other_port);
}

static long credentials(void)
{
	return open("/etc/group", O_RDONLY);
}

static long hosts(void)
{
	return open("/etc/hosts", O_RDONLY);
}

static long another_file(void)
{
	return open("/etc/passwd", O_RDONLY);
}

static long write_credentials(void)
{
	return open("/etc/group", O_WRONLY);
}

static long udp(void)
{
	return socket(AF_INET, SOCK_DGRAM, 0);
}

static long raw(void)
{
	return socket(AF_INET, SOCK_RAW, IPPROTO_ICMP);
}

static long unix_socket(void)
{
	return socket(AF_UNIX, SOCK_STREAM, 0);
}

static long listen_there(void)
{
	return listen(socket(AF_INET, SOCK_STREAM, 0), 1);
}

/* 0: it works. 1: it is denied. 2: it fails in another way. 3: this host's sandbox does not know such a rule. */
static int ask(long (*call)(void), int abi)
{
	const struct sandbox_root roots[] = { { root.fd, true, root.path } };
	const char *const readable[] = { "/etc/group", "/no/such/credentials", NULL };
	const struct sandbox_spec spec = { .roots = roots, .root_count = 1, .ports = &its_port, .port_count = 1, .readable = readable };
	int status = 0;

	pid_t child = fork();
	if (child == 0) {
		if (sandbox_enter(&spec, &entered))
			_exit(100);
		if (entered.landlock_abi < abi || !entered.seccomp)
			_exit(3);
		_exit(call() >= 0 ? 0 : errno == EPERM || errno == EACCES ? 1 : 2);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFEXITED(status));
	return WEXITSTATUS(status);
}

static void test_a_storage_behind_a_network(void **state)
{
	static const struct { long (*call)(void); const char *what; int abi; bool works; } questions[] = {
		{ its_storage, "its storage", 0, true },       { udp, "udp", 0, true },
		{ credentials, "its credentials", 1, true },   { hosts, "/etc/hosts", 1, true },
		{ another_port, "another port", 4, false },    { another_file, "another file", 1, false },
		{ write_credentials, "writing", 0, false },    { raw, "raw sockets", 0, false },
		{ unix_socket, "unix sockets", 0, false },     { listen_there, "listen", 0, false },
	};

	(void)state;
	for (size_t i = 0; i < sizeof questions / sizeof *questions; i++) {
		int got = ask(questions[i].call, questions[i].abi);
		if (got != 3 && got != !questions[i].works)
			fail_msg("%s: %d", questions[i].what, got);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_a_storage_behind_a_network) };

	t_dir_make(&root);
	listeners[0] = listen_on(&its_port);
	listeners[1] = listen_on(&other_port);
	int bad = cmocka_run_group_tests(tests, NULL, NULL);
	t_dir_remove(&root);
	return bad;
}
