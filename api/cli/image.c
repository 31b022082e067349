/* image.c: dcpctl image: what a sealed generation holds, as safetensors files: one rank's image, or a folder of all, with their digests,
 * which is a checkpoint to dcpd (api/image.md). A file has its name once all of it is there. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "api/cli/commands.h"
#include "api/cli/show.h"
#include "base/mem.h"

enum { PATH_BYTES = 4096 };

static FALLIBLE enum err save_image(struct client *c, const char *name, uint64_t rank, const char *generation, const char *to)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(16384);
	char part[PATH_BYTES + 16], number[24];

	if (snprintf(part, sizeof part, "%s.part", to) >= (int)sizeof part)
		return ERR(INVALID_REQUEST, "a path of %zu bytes", strlen(to));
	snprintf(number, sizeof number, "%ju", (uintmax_t)rank);
	client_put(&path, "/v1/state-dicts/%/ranks/%/image", name, number);
	client_put(&path, "?generation=%", generation);
	TRY(client_end(&path));
	int fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
	if (fd < 0)
		return ERR_SYS(SYSTEM, "cannot write %s", part);
	enum err e = client_save(c, (const char *)path.p, fd);
	if (close(fd) != 0 && !e)
		e = ERR_SYS(SYSTEM, "cannot write %s", part);
	if (!e && rename(part, to) != 0)
		e = ERR_SYS(SYSTEM, "cannot write %s", to);
	if (e) {
		CLEANUP(err_restore) struct err_info why = *err_last();
		unlink(part);
	}
	return e;
}

static FALLIBLE enum err save_text(const char *folder, const char *name, const struct buf *text)
{
	char path[PATH_BYTES];

	snprintf(path, sizeof path, "%s/%s", folder, name);
	FILE *f = fopen(path, "w");
	if (!f)
		return ERR_SYS(SYSTEM, "cannot write %s", path);
	bool bad = fwrite(text->p, 1, text->len, f) != text->len;
	bad |= fclose(f) != 0;
	return bad ? ERR_SYS(SYSTEM, "cannot write %s", path) : OK;
}

/* Digests, then images: those of the generation that the digests are of. */
static FALLIBLE enum err save_all(struct client *c, const char *name, const char *generation, const char *folder)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(16384);
	CLEANUP(client_drop) struct answer digests = { 0 };
	char number[24], to[PATH_BYTES];
	const json_t *file;
	size_t rank;

	client_put(&path, "/v1/state-dicts/%/digests", name);
	client_put(&path, "?generation=%", generation);
	TRY(client_get_at(c, &path, &digests));
	snprintf(number, sizeof number, "%jd", (intmax_t)json_integer_value(json_object_get(digests.json, "generation")));
	if (mkdir(folder, 0777) != 0 && errno != EEXIST)
		return ERR_SYS(SYSTEM, "cannot make %s", folder);
	json_array_foreach(json_object_get(digests.json, "files"), rank, file) {
		const char *is = show_text(file, "name");
		if (!is[0] || strchr(is, '/') || snprintf(to, sizeof to, "%s/%s", folder, is) >= (int)sizeof to)
			return ERR(INVALID_REQUEST, "the daemon names a file \"%.100s\"", is);
		TRY(save_image(c, name, rank, number, to));
	}
	return save_text(folder, ".dcpd.json", &digests.body);
}

int image_save(const struct command *, struct client *c, const struct args *a)
{
	const char *ref = a->words[0], *out = a->words[1], *rank = args_value(a, "rank"), *of = args_value(a, "generation");
	uint64_t number = 0;

	if (!args_is_shm(ref) || !ref[4] || strchr(ref, '/'))
		return follow_failed(c, ERR(INVALID_REQUEST, "\"%.200s\" is no state dict of this daemon's: shm:NAME", ref));
	if (rank && !str_to_u64(str_of(rank), &number))
		return follow_failed(c, ERR(INVALID_REQUEST, "\"%.40s\" is no rank", rank));
	enum err e = rank ? save_image(c, ref + 4, number, of, out) : save_all(c, ref + 4, of, out);
	return e ? follow_failed(c, e) : EXIT_DONE;
}
