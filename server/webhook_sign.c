/* webhook_sign.c: see webhook_sign.h. Secrets are files, read anew for each delivery: one that is replaced counts at once, and no copy is
 * in the journal or in memory. */
#include "server/webhook_sign.h"

#include <fcntl.h>
#include <sodium.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "os/fs.h"

static FALLIBLE enum err check_file(int fd, const char *name)
{
	struct stat st;

	if (fstat(fd, &st) != 0)
		return ERR_SYS(SYSTEM, "cannot look at the secret %s", name);
	if (!S_ISREG(st.st_mode))
		return ERR(VALIDATION_FAILED, "the secret %s is no regular file", name);
	if (st.st_uid != 0 && st.st_uid != geteuid())
		return ERR(VALIDATION_FAILED, "the secret %s belongs to uid %u: it must be root's or dcpd's own", name, st.st_uid);
	if (st.st_mode & 077)
		return ERR(VALIDATION_FAILED, "the secret %s has mode %04o: others may use it; chmod 0600", name, st.st_mode & 07777);
	return OK;
}

static FALLIBLE enum err read_secret(int fd, const char *name, unsigned char *out, size_t *n_out)
{
	unsigned char more;
	size_t n = 0;
	ssize_t got;

	TRY(check_file(fd, name));
	while (n < WEBHOOK_SECRET_MAX && (got = read(fd, out + n, WEBHOOK_SECRET_MAX - n)) != 0) {
		if (got < 0)
			return ERR_SYS(SYSTEM, "cannot read the secret %s", name);
		n += (size_t)got;
	}
	if (n == WEBHOOK_SECRET_MAX && read(fd, &more, 1) != 0)
		return ERR(VALIDATION_FAILED, "the secret %s has more than %d bytes", name, WEBHOOK_SECRET_MAX);
	while (n && (out[n - 1] == '\n' || out[n - 1] == '\r' || out[n - 1] == ' ' || out[n - 1] == '\t'))
		n--;
	if (n < WEBHOOK_SECRET_MIN)
		return ERR(VALIDATION_FAILED, "the secret %s has less than %d bytes", name, WEBHOOK_SECRET_MIN);
	*n_out = n;
	return OK;
}

FALLIBLE enum err webhook_sign_secret(const char *folder, const char *name, unsigned char out[WEBHOOK_SECRET_MAX], size_t *n_out)
{
	CLEANUP(fs_drop) int dir = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (dir < 0 && errno != ENOENT)
		return ERR_SYS(SYSTEM, "cannot open the folder of secrets %s", folder);
	/* Non-blocking: a FIFO in its place must not hold up the caller. */
	CLEANUP(fs_drop) int fd = dir < 0 ? -1 : openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0 && errno == ENOENT)
		return ERR(VALIDATION_FAILED, "there is no secret %s: make the file %s/%s, mode 0600", name, folder, name);
	if (fd < 0)
		return ERR(VALIDATION_FAILED, "the secret %s cannot be opened: %s", name, strerrordesc_np(errno));
	return read_secret(fd, name, out, n_out);
}

void webhook_sign(const unsigned char *secret, size_t secret_bytes, int64_t unix_s, struct str body, char out[WEBHOOK_SIGNATURE_MAX])
{
	unsigned char mac[crypto_auth_hmacsha256_BYTES];
	char hex[2 * sizeof mac + 1], time[32];
	crypto_auth_hmacsha256_state state;

	snprintf(time, sizeof time, "%jd", (intmax_t)unix_s);
	crypto_auth_hmacsha256_init(&state, secret, secret_bytes);
	crypto_auth_hmacsha256_update(&state, (const unsigned char *)time, strlen(time));
	crypto_auth_hmacsha256_update(&state, (const unsigned char *)".", 1);
	crypto_auth_hmacsha256_update(&state, (const unsigned char *)body.p, body.n);
	crypto_auth_hmacsha256_final(&state, mac);
	sodium_bin2hex(hex, sizeof hex, mac, sizeof mac);
	snprintf(out, WEBHOOK_SIGNATURE_MAX, "t=%s,v1=%s", time, hex);
}

int64_t webhook_sign_backoff_ms(unsigned attempts, uint32_t random)
{
	enum { FIRST_MS = 1000, MOST_MS = 3600000, DOUBLINGS = 12 };
	int64_t ms = attempts > DOUBLINGS ? MOST_MS : (int64_t)FIRST_MS << (attempts ? attempts - 1 : 0);

	if (ms > MOST_MS)
		ms = MOST_MS;
	return ms - (int64_t)(random % (uint32_t)(ms / 2 + 1));
}
