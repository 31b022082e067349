/* config_s3.c: `s3.NAME.endpoint` and the like: what dcpd's workers are told about a storage on S3. Its credentials are not among them:
 * the configuration says where they are, and a worker reads them. */
#include "server/config.h"

#include <string.h>

#include "base/num.h"

static const char *const keys[] = { "endpoint", "region", "path-style", "credentials" };

/* "NAME.KEY=VALUE" */
static FALLIBLE enum err take(const char *item, struct str *storage, struct str *key, struct str *value)
{
	size_t n = strcspn(item, "="), dot = strcspn(item, ".=");

	if (!item[n] || dot == n)
		return ERR(CONFIG, "s3.%.100s is not s3.NAME.KEY = VALUE", item);
	*storage = (struct str){ item, dot };
	*key = (struct str){ item + dot + 1, n - dot - 1 };
	*value = str_of(item + n + 1);
	return OK;
}

static FALLIBLE enum err check_value(const char *item, struct str key, struct str value)
{
	bool known = false, good = value.n > 0;

	for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
		known = known || str_is(key, keys[i]);
	if (!known)
		return ERR(CONFIG, "s3.%.100s: known are endpoint, region, path-style and credentials", item);
	if (str_is(key, "endpoint"))
		good = str_starts(value, "http://") || str_starts(value, "https://");
	else if (str_is(key, "region"))
		good = value.n > 0 && strcspn(value.p, " \t#") == value.n;
	else if (str_is(key, "path-style"))
		good = str_is(value, "true") || str_is(value, "false");
	else if (str_is(key, "credentials"))
		good = str_is(value, "env") || str_starts(value, "/");
	if (!good)
		return ERR(CONFIG, "s3.%.200s: endpoint is http[s]://HOST[:PORT], region one word, path-style true or false, credentials "
			   "env or a file's absolute path; a comment has a line of its own", item);
	return OK;
}

static bool is_on_s3(const struct config *c, struct str storage)
{
	for (uint32_t i = 0; i < c->storage.count; i++) {
		const char *item = c->storage.items[i];
		size_t n = strcspn(item, "=");
		if (n == storage.n && memcmp(item, storage.p, n) == 0)
			return str_starts(str_of(item + n + (item[n] == '=')), "s3://");
	}
	return false;
}

FALLIBLE enum err config_s3_derive(const struct config *c)
{
	struct str storage, key, value;

	for (uint32_t i = 0; i < c->s3.count; i++) {
		TRY(take(c->s3.items[i], &storage, &key, &value));
		TRY(check_value(c->s3.items[i], key, value));
		if (!is_on_s3(c, storage))
			return ERR(CONFIG, "s3.%.100s: there is no storage \"%.*s\" at s3://…", c->s3.items[i], (int)num_min(storage.n, 64),
				   storage.p);
	}
	return OK;
}

FALLIBLE enum err config_s3_options(const struct config *c, struct str name, json_t **out)
{
	struct str storage, key, value;

	*out = NULL;
	for (uint32_t i = 0; i < c->s3.count; i++) { /* in the order of precedence */
		TRY(take(c->s3.items[i], &storage, &key, &value));
		if (!str_eq(storage, name))
			continue;
		if (!*out)
			*out = json_object();
		if (json_object_setn_new_nocheck(*out, key.p, key.n, json_stringn(value.p, value.n)) != 0) {
			json_decref(*out);
			*out = NULL;
			return ERR(NO_MEMORY, "cannot keep the configuration");
		}
	}
	return OK;
}
