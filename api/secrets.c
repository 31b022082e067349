/* secrets.c: see secrets.h. */
#include "api/secrets.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/mem.h"
#include "os/fs.h"

enum { TOKEN_BYTES = 24, TEXT_MAX = 1 << 20 };

/* Opens the folder of a path; *name_out is the rest. */
static FALLIBLE enum err open_folder(const char *path, const char **name_out, int *fd_out)
{
	CLEANUP(mem_free_ptr) char *folder = mem_strdup(path);
	char *slash = folder ? strrchr(folder, '/') : NULL;

	NEED(folder, "cannot open %s", path);
	*name_out = slash ? path + (slash - folder) + 1 : path;
	if (slash)
		slash[slash == folder ? 1 : 0] = '\0';
	return fs_open_root(slash ? folder : ".", fd_out);
}

FALLIBLE enum err secrets_text(const char *path, char **text_out)
{
	CLEANUP(fs_drop) int folder = -1;
	const char *name = NULL;
	void *bytes = NULL;
	uint64_t n = 0;

	TRY(open_folder(path, &name, &folder));
	TRY(fs_read_all(folder, name, TEXT_MAX, &bytes, &n));
	char *text = mem_grow(bytes, n + 1, 1);
	if (!text) {
		mem_free(bytes);
		return ERR(NO_MEMORY, "cannot read %s", path);
	}
	text[n] = '\0';
	*text_out = text;
	return OK;
}

static FALLIBLE enum err make_token(const char *path)
{
	CLEANUP(fs_drop) int folder = -1;
	CLEANUP(fs_drop) int fd = -1;
	CLEANUP(buf_free) struct buf text = BUF_INIT(256);
	unsigned char random[TOKEN_BYTES];
	char hex[2 * TOKEN_BYTES + 1];
	const char *name = NULL;

	if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
		return ERR_SYS(SYSTEM, "cannot make a token");
	sodium_bin2hex(hex, sizeof hex, random, sizeof random);
	buf_printf(&text, "%s\n", hex);
	TRY(buf_status(&text));
	TRY(open_folder(path, &name, &folder));
	TRY(fs_open(folder, name, O_CREAT | O_EXCL | O_WRONLY, 0600, &fd));
	enum err e = fs_pwrite(fd, text.p, text.len, 0, name);
	e = e ?: fs_fsync(fd, name);
	if (e) /* half a token would be refused at every start from here on */
		(void)unlinkat(folder, name, 0);
	return e;
}

FALLIBLE enum err secrets_token(const char *path, char **text_out)
{
	enum err e = secrets_text(path, text_out);

	if (e != ERR_NOT_FOUND)
		return e;
	TRY(make_token(path));
	return secrets_text(path, text_out);
}
