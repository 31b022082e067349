/* config_access.c: who may use the files of checkpoints: mode and group, in general and for one storage (see config.h).
 *
 * The umask decides only where nobody said anything and no service manager started dcpd: then checkpoints can be read by whom the
 * user's other files can. A service has a umask for its journal and token, which says nothing of checkpoints. */
#include <grp.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/config.h"

enum { GROUPS_MAX = 1024 };

/* 0 stands for "not set", so it is none; without rw for its owner dcpd could not finish what it makes. */
FALLIBLE enum err config_mode(struct str v, uint64_t *out)
{
	uint64_t mode = 0;

	for (size_t i = 0; i < v.n; i++)
		mode = v.p[i] >= '0' && v.p[i] <= '7' && mode <= 0777 ? mode * 8 + (uint64_t)(v.p[i] - '0') : UINT64_MAX;
	if (v.n == 0 || mode > 0777 || (mode & 0600) != 0600 || mode & 0111)
		return ERR(CONFIG, "\"%.*s\" is no mode of files, such as 0640: octal, rw for the owner, no x", (int)v.n, v.p);
	*out = mode;
	return OK;
}

/* The umask that the daemon was started with; it has one of its own by the time that the configuration is read again. */
static mode_t first_umask(void)
{
	static mode_t mask;
	static bool known;

	if (!known) {
		mask = umask(0077);
		umask(mask);
		known = true;
	}
	return mask;
}

static FALLIBLE enum err find_group(const char *name, gid_t *out)
{
	gid_t groups[GROUPS_MAX];
	const struct group *g = getgrnam(name);
	int n = getgroups(GROUPS_MAX, groups);

	if (!g)
		return ERR(CONFIG, "file-group: there is no group \"%s\"", name);
	*out = g->gr_gid;
	bool ours = geteuid() == 0 || getegid() == g->gr_gid;
	for (int i = 0; i < n; i++)
		ours = ours || groups[i] == g->gr_gid;
	return ours ? OK : ERR(CONFIG, "file-group: dcpd's user is no member of \"%s\"", name);
}

FALLIBLE enum err config_access_derive(struct config *c, bool is_service)
{
	struct config_access access;

	if (!c->file_mode)
		c->file_mode = is_service ? 0640 : (0666 & ~(uint64_t)first_umask()) | 0600;
	c->file_gid = CONFIG_NO_GROUP;
	if (c->file_group)
		TRY(find_group(c->file_group, &c->file_gid));
	for (uint32_t i = 0; i < c->storage_option.count; i++) {
		const char *item = c->storage_option.items[i];
		bool known = false;
		for (uint32_t k = 0; k < c->storage.count; k++)
			known = known || (strcspn(c->storage.items[k], "=") == strcspn(item, ".") &&
					  strncmp(c->storage.items[k], item, strcspn(item, ".")) == 0);
		if (!known)
			return ERR(CONFIG, "%s: there is no such storage", item);
		TRY(config_access_of(c, (struct str){ item, strcspn(item, ".") }, &access));
	}
	return OK;
}

FALLIBLE enum err config_access_of(const struct config *c, struct str storage, struct config_access *out)
{
	*out = (struct config_access){ (mode_t)c->file_mode, c->file_gid };
	for (uint32_t i = 0; i < c->storage_option.count; i++) { /* in the order of precedence */
		struct str item = str_of(c->storage_option.items[i]);
		if (item.n <= storage.n || memcmp(item.p, storage.p, storage.n) != 0 || item.p[storage.n] != '.')
			continue;
		const char *key = item.p + storage.n + 1, *value = strchr(key, '=') + 1;
		uint64_t mode = 0;
		if (strncmp(key, "file-group=", 11) == 0)
			TRY(find_group(value, &out->gid));
		else
			TRY(config_mode(str_of(value), &mode));
		out->mode = mode ? (mode_t)mode : out->mode;
	}
	return OK;
}
