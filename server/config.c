/* config.c: see config.h. One table is the whole truth about the options; everything else in this file walks it. */
#include "server/config.h"

#include <ctype.h>
#include <grp.h>
#include <stdarg.h>
#include <sched.h>
#include <stddef.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/near.h"
#include "base/num.h"
#include "server/webhook_address.h"

enum kind { TEXT, LIST, BYTES, COUNT, DURATION, FLAG, KEEP, FORMAT, ENGINE, MODE };

struct option {
	const char *key;
	enum kind kind;
	size_t offset;
	const char *fallback;        /* NULL: none, or worked out in fill_defaults */
	const char *argument, *doc;
};

#define AT(field) offsetof(struct config, field)

static const struct option table[] = {
	{ "config", TEXT, AT(config_file), NULL, "FILE",
	  "file of `key = value` lines; repeated keys make lists, lines with # in front are comments" },
	{ "state-dir", TEXT, AT(state_dir), NULL, "DIR",
	  "journal, token and socket; default /var/lib/dcpd as root, else $XDG_STATE_HOME/dcpd" },
	{ "storage", LIST, AT(storage), NULL, "NAME=DIR", "a storage: a directory, or s3://BUCKET/PREFIX; may be repeated" },
	{ "tier", LIST, AT(tier), NULL, "NAME=STORAGE",
	  "durable checkpoints of NAME are copied to STORAGE behind; also tier.NAME = STORAGE, with tier.NAME.behind, .order, .pace" },
	{ "s3", LIST, AT(s3), NULL, "NAME.KEY=VALUE",
	  "of a storage NAME=s3://BUCKET/PREFIX: s3.NAME.endpoint, .region, .path-style and .credentials (a file, or env)" },
	{ "listen", LIST, AT(listen), NULL, "ADDR",
	  "unix:PATH, HOST:PORT or PORT (0: any); may be repeated; default unix:$STATE/dcpd.sock and 127.0.0.1:8427" },
	{ "workers", COUNT, AT(workers), NULL, "N", "worker processes of a job; default one per CPU, at least 2" },
	{ "shm-limit", BYTES, AT(shm_limit), "80%", "BYTES", "shared memory for state dicts; a percentage is of /dev/shm" },
	{ "device-limit", BYTES, AT(device_limit), "0", "BYTES", "memory of each GPU for device images; 0: as much as it has" },
	{ "keep-jobs", KEEP, AT(keep_jobs), "10000/30d", "COUNT/AGE", "how many records of ended jobs are kept, and for how long" },
	{ "allow-group", TEXT, AT(allow_group), NULL, "GROUP",
	  "opens the Unix socket to its members, who need no token; default dcpd as a system service" },
	{ "file-mode", MODE, AT(file_mode), NULL, "MODE",
	  "of checkpoints' files; directories get x where it has r; default 0640 as a system service, else by the umask" },
	{ "file-group", TEXT, AT(file_group), NULL, "GROUP",
	  "of checkpoints' files; both also for one storage: --NAME.file-mode, --NAME.file-group" },
	{ "allowed-host", LIST, AT(allowed_host), NULL, "NAME", "accepted in Host headers beside localhost and addresses" },
	{ "webhook-allow", LIST, AT(webhook_allow), NULL, "CIDR",
	  "a network that webhooks may be sent to beside public addresses, such as 10.0.0.0/8; may be repeated" },
	{ "tls-cert", TEXT, AT(tls_cert), NULL, "FILE", "PEM certificate chain for the TCP listeners" },
	{ "tls-key", TEXT, AT(tls_key), NULL, "FILE", "PEM key for the TCP listeners" },
	{ "insecure-http", FLAG, AT(insecure_http), "false", NULL, "allow TCP beyond loopback without TLS" },
	{ "log-format", FORMAT, AT(log_json), "logfmt", "logfmt|json", "form of the log lines on standard error" },
	{ "otlp-endpoint", TEXT, AT(otlp_endpoint), NULL, "URL",
	  "OpenTelemetry collector that gets a span of each job and of its stages, such as http://localhost:4318" },
	{ "cluster", TEXT, AT(cluster), NULL, "URL[,URL]...",
	  "etcd's servers, such as http://127.0.0.1:2379: this daemon is a node of a cluster" },
	{ "node", TEXT, AT(node), NULL, "NAME", "its name in the cluster" },
	{ "advertise", TEXT, AT(advertise), NULL, "HOST:PORT", "where the other nodes reach it" },
	{ "cluster-prefix", TEXT, AT(cluster_prefix), "/dcpd", "PREFIX", "of the cluster's keys in etcd" },
	{ "cluster-ttl", DURATION, AT(cluster_ttl_ms), "10s", "TIME", "a node that etcd has not heard of for so long is away" },
	{ "cluster-ca", TEXT, AT(cluster_ca), NULL, "FILE", "PEM certificates of the authorities for etcd and the other nodes" },
	{ "cluster-cert", TEXT, AT(cluster_cert), NULL, "FILE", "PEM certificate that etcd is shown" },
	{ "cluster-key", TEXT, AT(cluster_key), NULL, "FILE", "its PEM key" },
	{ "cluster-user", TEXT, AT(cluster_user), NULL, "FILE", "its first line is USER:PASSWORD, for etcd" },
	{ "neighbour-memory", BYTES, AT(neighbour_memory), "0", "BYTES",
	  "shared memory for copies of other nodes' checkpoints, within shm-limit; a percentage is of /dev/shm; 0: none are taken" },
	{ "neighbour-keep", DURATION, AT(neighbour_keep_ms), "24h", "TIME", "such a copy goes after so long without a newer one" },
	{ "web-root", TEXT, AT(web_root), NULL, "DIR", "serve the page's files from here, not from inside the program" },
	{ "worker-path", TEXT, AT(worker_path), NULL, "FILE", "the worker program; default dcpd-worker beside this program" },
	{ "io-engine", ENGINE, AT(io_engine), "auto", "auto|io_uring|threads", "how workers read and write" },
	{ "comm-listen", TEXT, AT(comm_listen), "127.0.0.1", "ADDR",
	  "address or interface on which the workers of one job listen for each other (operations with backend tcp)" },
	{ "comm-deadline", DURATION, AT(comm_deadline_ms), "30s", "TIME", "a worker that the others wait for this long is given up" },
	{ "job-memory", BYTES, AT(job_memory), "192MiB", "BYTES", "buffers of all workers of one job together" },
	{ "gang-idle", DURATION, AT(gang_idle_ms), "60s", "TIME", "idle workers are kept warm for so long" },
	{ "lookup-idle", DURATION, AT(lookup_idle_ms), "30s", "TIME", "the same for workers that answer questions" },
	{ "lookup-deadline", DURATION, AT(lookup_deadline_ms), "10s", "TIME", "a storage that lets a system call wait so long is stalled" },
	{ "stall-after", DURATION, AT(stall_ms), "30s", "TIME", "a job without progress for so long is shown as stalled" },
	{ "stall-deadline", DURATION, AT(stall_deadline_ms), "10m", "TIME", "and after so long it fails" },
	{ "drain-timeout", DURATION, AT(drain_ms), "30s", "TIME", "at SIGTERM, running jobs get so long to end" },
	{ "lease", DURATION, AT(lease_ms), "60s", "TIME", "a trainer that is silent for so long is taken for dead" },
	{ "keep-sealed", DURATION, AT(keep_sealed_ms), "1h", "TIME", "what a dead trainer had sealed is kept for so long" },
	{ "queue-max", COUNT, AT(queue_max), "10000", "N", "waiting jobs; more are refused" },
	{ "token-rate", COUNT, AT(token_rate), "0", "N", "requests a second that each token may make; 0: any number" },
	{ "check-config", FLAG, AT(check_config), "false", NULL, "check the configuration and the folders and files in it, and leave" },
	{ "print-config", FLAG, AT(print_config), "false", NULL, "print the configuration with its sources and leave" },
	{ "doctor", TEXT, AT(doctor), NULL, "text|json", "say what this host lacks, each with the command that mends it, and leave" },
	{ "manual", TEXT, AT(manual), NULL, "8|5", "print the manual page dcpd(8), or dcpd.conf(5), and leave" },
	{ "version", FLAG, AT(version), "false", NULL, "print the version and leave" },
	{ "help", FLAG, AT(help), "false", NULL, "print this and leave" },
};

enum { OPTIONS = sizeof table / sizeof *table };
_Static_assert(OPTIONS <= sizeof((struct config *)0)->from, "config.from is too short");

static const char *const source_names[] = { "default", "file", "environment", "command line" };

const char *config_key(uint32_t index)
{
	return index < OPTIONS ? table[index].key : NULL;
}

/* ---- values ---- */

static bool split_number(struct str text, uint64_t *number, struct str *unit)
{
	size_t n = 0;

	while (n < text.n && isdigit((unsigned char)text.p[n]))
		n++;
	*unit = (struct str){ text.p + n, text.n - n };
	return str_to_u64((struct str){ text.p, n }, number);
}

FALLIBLE enum err config_bytes(struct str text, uint64_t percent_of, uint64_t *out)
{
	static const struct {
		const char *unit;
		unsigned shift;
	} units[] = { { "", 0 },     { "B", 0 },    { "K", 10 },   { "KiB", 10 }, { "M", 20 },
		      { "MiB", 20 }, { "G", 30 },   { "GiB", 30 }, { "T", 40 },   { "TiB", 40 } };
	uint64_t number;
	struct str unit;

	if (!split_number(text, &number, &unit))
		return ERR(CONFIG, "\"%.*s\" is no size, such as 512MiB", (int)text.n, text.p);
	if (percent_of && str_is(unit, "%") && number <= 100) {
		*out = percent_of / 100 * number;
		return OK;
	}
	for (size_t i = 0; i < sizeof units / sizeof *units; i++)
		if (str_is(unit, units[i].unit) && number <= UINT64_MAX >> units[i].shift) {
			*out = number << units[i].shift;
			return OK;
		}
	return ERR(CONFIG, "\"%.*s\" is no size, such as 512MiB", (int)text.n, text.p);
}

FALLIBLE enum err config_duration(struct str text, int64_t *ms_out)
{
	return str_to_ms(text, ms_out) ? OK : ERR(CONFIG, "\"%.*s\" is no time, such as 30s", (int)text.n, text.p);
}

/* Known stores, as a user writes their locations. */
static const char known_stores[] =
#define X(scheme, location, ops) " " scheme "://" location
#define INNER(...)
#include "store/stores.def"
;

/* *dir_out: what stands behind "file://", which need not be there; other stores' locations stay as they are. */
static FALLIBLE enum err take_location(const char *item, const char *location, const char **dir_out)
{
	static const char *const schemes[] = {
#define X(scheme, location, ops) scheme,
#define INNER(...)
#include "store/stores.def"
	};
	size_t n = strcspn(location, ":/");
	bool known = false;

	if (strncmp(location + n, "://", 3) != 0)
		n = 0;
	for (size_t i = 0; n && i < sizeof schemes / sizeof *schemes; i++)
		known = known || str_is((struct str){ location, n }, schemes[i]);
	if (n && !known)
		return ERR(CONFIG, "storage \"%s\": there is no store \"%.*s\"; known are%s", item, (int)n, location, known_stores);
	*dir_out = str_is((struct str){ location, n }, "file") ? location + n + 3 : location;
	return OK;
}

FALLIBLE enum err config_storage(const char *item, struct str *name_out, const char **dir_out)
{
	size_t n = strcspn(item, "=");
	bool good = n >= 1 && n <= 32 && item[n] == '=' && item[0] >= 'a' && item[0] <= 'z';

	for (size_t i = 0; good && i < n; i++)
		good = (item[i] >= 'a' && item[i] <= 'z') || isdigit((unsigned char)item[i]) || item[i] == '_' || item[i] == '-';
	if (good)
		TRY(take_location(item, item + n + 1, dir_out));
	bool is_path = good && !strstr(*dir_out, "://");
	if (!good || (is_path && (*dir_out)[0] != '/') || (n == 3 && memcmp(item, "shm", 3) == 0))
		return ERR(CONFIG, "storage \"%s\" is not NAME=/DIR or NAME=s3://BUCKET/PREFIX, with a NAME of [a-z][a-z0-9_-]{0,31} that "
			   "is not shm", item);
	*name_out = (struct str){ item, n };
	return OK;
}

static FALLIBLE enum err set_text(char **slot, struct str text)
{
	char *copy = mem_alloc(text.n + 1);

	NEED(copy, "cannot keep the configuration");
	memcpy(copy, text.p, text.n);
	copy[text.n] = '\0';
	mem_free(*slot);
	*slot = copy;
	return OK;
}

static void list_clear(struct config_list *list)
{
	for (uint32_t i = 0; i < list->count; i++)
		mem_free(list->items[i]);
	*list = (struct config_list){ 0 };
}

static FALLIBLE enum err list_add(struct config_list *list, struct str text)
{
	if (list->count == CONFIG_LIST_MAX)
		return ERR(CONFIG, "more than %d items", CONFIG_LIST_MAX);
	TRY(set_text(&list->items[list->count], text));
	list->count++;
	return OK;
}

static uint64_t shm_bytes(void)
{
	struct statvfs v;

	return statvfs("/dev/shm", &v) == 0 ? v.f_blocks * v.f_frsize : 0;
}

static FALLIBLE enum err set_count(struct str v, bool not_none, uint64_t *out)
{
	if (!str_to_u64(v, out) || *out < not_none || *out > 1000000)
		return ERR(CONFIG, "must be a number from %d to 1000000", not_none);
	return OK;
}

static FALLIBLE enum err set_keep(struct config *c, struct str v)
{
	const char *slash = memchr(v.p, '/', v.n);

	if (!slash || !str_to_u64((struct str){ v.p, (size_t)(slash - v.p) }, &c->keep_jobs) || c->keep_jobs == 0)
		return ERR(CONFIG, "\"%.*s\" is not COUNT/AGE, such as 10000/30d", (int)v.n, v.p);
	return config_duration((struct str){ slash + 1, v.n - (size_t)(slash - v.p) - 1 }, &c->keep_jobs_ms);
}

static FALLIBLE enum err set_word(const struct option *o, struct config *c, struct str v)
{
	char *field = (char *)c + o->offset;

	if (o->kind == FLAG) {
		*(bool *)field = str_is(v, "true") || str_is(v, "yes") || str_is(v, "1");
		if (!*(bool *)field && !str_is(v, "false") && !str_is(v, "no") && !str_is(v, "0"))
			return ERR(CONFIG, "must be true or false");
		return OK;
	}
	if (o->kind == FORMAT) {
		*(bool *)field = str_is(v, "json");
		return str_is(v, "json") || str_is(v, "logfmt") ? OK : ERR(CONFIG, "must be logfmt or json");
	}
	if (!str_is(v, "auto") && !str_is(v, "io_uring") && !str_is(v, "threads"))
		return ERR(CONFIG, "must be auto, io_uring or threads");
	return set_text((char **)field, v);
}

static FALLIBLE enum err set_value(const struct option *o, struct config *c, struct str v)
{
	char *field = (char *)c + o->offset;
	struct str name;
	const char *dir;
	struct webhook_net net;

	switch (o->kind) {
	case TEXT:
		if (v.n == 0 || v.n >= CONFIG_PATH_MAX || memchr(v.p, '\0', v.n))
			return ERR(CONFIG, "must be a text of 1 to %d bytes", CONFIG_PATH_MAX - 1);
		return set_text((char **)field, v);
	case LIST:
		if (v.n == 0 || v.n >= CONFIG_PATH_MAX)
			return ERR(CONFIG, "must be a text of 1 to %d bytes", CONFIG_PATH_MAX - 1);
		TRY(list_add((struct config_list *)field, v));
		if (o->offset == AT(storage))
			return config_storage(c->storage.items[c->storage.count - 1], &name, &dir);
		if (o->offset == AT(webhook_allow))
			return webhook_address_parse(c->webhook_allow.items[c->webhook_allow.count - 1], &net);
		return OK;
	case BYTES:
		return config_bytes(v, o->offset == AT(job_memory) ? 0 : shm_bytes(), (uint64_t *)field);
	case COUNT:
		return set_count(v, o->offset != AT(token_rate), (uint64_t *)field);
	case DURATION:
		return config_duration(v, (int64_t *)field);
	case KEEP:
		return set_keep(c, v);
	case MODE:
		return config_mode(v, (uint64_t *)field);
	default:
		return set_word(o, c, v);
	}
}

/* Says which option and where it was set. */
static enum err at_option(enum err e, const char *key, const char *where)
{
	struct err_info info = *err_last();

	if (e == OK || info.code != e)
		return e;
	err_record(e, 0, info.place, "%s (%s): %s", key, where, info.text);
	return e;
}

/* Kept as text: whether there is such a storage is known at the end. */
static FALLIBLE enum err set_for_storage(struct config *c, const struct option *o, struct str storage, struct str v)
{
	char text[CONFIG_PATH_MAX + 128];
	uint64_t mode;

	if (v.n == 0 || v.n >= CONFIG_PATH_MAX)
		return ERR(CONFIG, "must be a text of 1 to %d bytes", CONFIG_PATH_MAX - 1);
	if (o->kind == MODE)
		TRY(config_mode(v, &mode));
	snprintf(text, sizeof text, "%.*s.%s=%.*s", (int)num_min(storage.n, 64), storage.p, o->key, (int)v.n, v.p);
	return list_add(&c->storage_option, str_of(text));
}

static FALLIBLE enum err set(struct config *c, const struct option *o, struct str storage, struct str v, enum config_source source)
{
	size_t row = (size_t)(o - table);
	char item[CONFIG_PATH_MAX];

	if (storage.n && (o->offset == AT(tier) || o->offset == AT(s3))) { /* tier.main = s3, s3.s3.region = us-east-1 */
		snprintf(item, sizeof item, "%.*s=%.*s", (int)num_min(storage.n, 100), storage.p, (int)num_min(v.n, 100), v.p);
		v = str_of(item);
		storage = STR("");
	}
	if (storage.n)
		return at_option(set_for_storage(c, o, storage, v), o->key, source_names[source]);
	if (o->kind == LIST && c->from[row] != source)
		list_clear((struct config_list *)((char *)c + o->offset));
	c->from[row] = (uint8_t)source;
	return at_option(set_value(o, c, v), o->key, source_names[source]);
}

/* ---- the three sources ---- */

static bool is_per_storage(const struct option *o)
{
	return o->offset == AT(file_mode) || o->offset == AT(file_group);
}

/* storage_out: of "main.file-mode" it is main, else empty. */
static const struct option *find(struct str key, struct str *storage_out)
{
	const char *dot = key.n ? memchr(key.p, '.', key.n) : NULL;

	*storage_out = (struct str){ key.p, dot ? (size_t)(dot - key.p) : 0 };
	if ((str_starts(key, "tier.") || str_starts(key, "s3.")) && dot + 1 < key.p + key.n) { /* behind it: a storage, perhaps an option */
		*storage_out = (struct str){ dot + 1, key.n - (size_t)(dot + 1 - key.p) };
		key.n = (size_t)(dot - key.p);
		dot = NULL;
	}
	if (dot)
		key = (struct str){ dot + 1, key.n - storage_out->n - 1 };
	for (size_t i = 0; i < OPTIONS; i++)
		if (str_is(key, table[i].key) && (!dot || (storage_out->n && is_per_storage(&table[i]))))
			return &table[i];
	return NULL;
}

static const char *hint_of(struct str key, char hint[NEAR_HINT_MAX])
{
	struct near near = near_begin(key);

	for (size_t i = 0; i < OPTIONS; i++)
		near_try(&near, str_of(table[i].key));
	return near_text(&near, hint);
}

/* Options that ask for something once, and so have no place in a file. */
static bool is_command(const struct option *o)
{
	return o->offset == AT(config_file) || o->offset == AT(check_config) || o->offset == AT(print_config) ||
	       o->offset == AT(help) || o->offset == AT(version) || o->offset == AT(manual) ||
	       o->offset == AT(doctor);
}

bool config_row(uint32_t index, struct config_row *out)
{
	const struct option *o = index < OPTIONS ? &table[index] : NULL;

	if (o)
		*out = (struct config_row){ o->key, o->argument, o->kind == FLAG ? NULL : o->fallback, o->doc, o->kind == LIST,
					    is_command(o) };
	return o;
}

static struct str trim(struct str s)
{
	while (s.n && isspace((unsigned char)s.p[0]))
		s = (struct str){ s.p + 1, s.n - 1 };
	while (s.n && isspace((unsigned char)s.p[s.n - 1]))
		s.n--;
	return s;
}

static FALLIBLE enum err read_line(struct config *c, struct str line, unsigned number)
{
	char hint[NEAR_HINT_MAX];

	line = trim(line);
	if (line.n == 0 || line.p[0] == '#')
		return OK;

	const char *eq = memchr(line.p, '=', line.n);
	if (!eq)
		return ERR(CONFIG, "%s:%u: expected key = value", c->config_file, number);
	struct str key = trim((struct str){ line.p, (size_t)(eq - line.p) });
	struct str value = trim((struct str){ eq + 1, line.n - (size_t)(eq - line.p) - 1 });
	struct str storage;
	const struct option *o = find(key, &storage);
	if (!o || is_command(o))
		return ERR(CONFIG, "%s:%u: unknown key \"%.*s\"%s", c->config_file, number, (int)key.n, key.p, hint_of(key, hint));
	char where[CONFIG_PATH_MAX + 32];
	snprintf(where, sizeof where, "line %u", number);
	return at_option(set(c, o, storage, value, CONFIG_FILE), c->config_file, where);
}

static FALLIBLE enum err read_file(struct config *c)
{
	char line[CONFIG_PATH_MAX * 2];
	enum err e = OK;
	FILE *f = fopen(c->config_file, "re");

	if (!f)
		return ERR_SYS(CONFIG, "cannot read %s", c->config_file);
	for (unsigned number = 1; !e && fgets(line, sizeof line, f); number++) {
		size_t n = strlen(line);
		if (n == sizeof line - 1 && line[n - 1] != '\n')
			e = ERR(CONFIG, "%s:%u: the line is too long", c->config_file, number);
		else
			e = read_line(c, (struct str){ line, n }, number);
	}
	fclose(f);
	return e;
}

static FALLIBLE enum err read_env_item(struct config *c, const struct option *o, const char *value)
{
	if (o->kind != LIST)
		return set(c, o, STR(""), str_of(value), CONFIG_ENV);
	while (*value) {
		size_t n = strcspn(value, ",");
		struct str item = trim((struct str){ value, n });
		if (item.n)
			TRY(set(c, o, STR(""), item, CONFIG_ENV));
		value += n + (value[n] == ',');
	}
	return OK;
}

/* Variables that belong to clients or tests and share the prefix. */
static bool foreign_variable(struct str name)
{
	static const char *const known[] = { "DCPD_URL", "DCPD_TOKEN", "DCPD_TOKEN_FILE", "DCPD_FAULT",
					     /* api/python/README.md */
					     "DCPD_BIN", "DCPD_COPY_THREADS", "DCPD_HOSTS_TIMEOUT", "DCPD_PACE", NULL };

	for (size_t i = 0; known[i]; i++)
		if (str_is(name, known[i]))
			return true;
	return str_starts(name, "DCPD_FAKE_") || str_starts(name, "DCPD_TEST_");
}

/* DCPD_SHM_LIMIT=… is shm-limit. only_config: just DCPD_CONFIG, which is needed before the rest. */
static FALLIBLE enum err read_env(struct config *c, char *const *env, bool only_config)
{
	for (; env && *env; env++) {
		size_t n = strcspn(*env, "=");
		char key[64], hint[NEAR_HINT_MAX];

		if (strncmp(*env, "DCPD_", 5) != 0 || (*env)[n] != '=' || !(*env)[n + 1] || n - 5 >= sizeof key)
			continue; /* an empty one, as Compose hands over what .env leaves open, is as none */
		for (size_t i = 5; i < n; i++)
			key[i - 5] = (*env)[i] == '_' ? '-' : (char)tolower((unsigned char)(*env)[i]);
		key[n - 5] = '\0';
		struct str storage;
		const struct option *o = find(str_of(key), &storage);
		bool is_config = o && o->offset == AT(config_file);
		if (is_config != only_config || foreign_variable((struct str){ *env, n }))
			continue;
		if (!o)
			return ERR(CONFIG, "environment: unknown key %.*s%s", (int)n, *env, hint_of(str_of(key), hint));
		TRY(read_env_item(c, o, *env + n + 1));
	}
	return OK;
}

static FALLIBLE enum err read_argv(struct config *c, int argc, char *const *argv, bool only_config)
{
	for (int i = 1; i < argc; i++) {
		const char *a = argv[i], *value = NULL;
		char hint[NEAR_HINT_MAX];
		if (strncmp(a, "--", 2) != 0)
			return ERR(CONFIG, "unexpected argument \"%s\"; see dcpd --help", a);
		size_t n = strcspn(a + 2, "=");
		struct str storage;
		const struct option *o = find((struct str){ a + 2, n }, &storage);
		if (!o)
			return ERR(CONFIG, "unknown option \"%s\"%s; see dcpd --help", a, hint_of((struct str){ a + 2, n }, hint));
		if (a[2 + n] == '=')
			value = a + 2 + n + 1;
		else if (o->kind == FLAG)
			value = "true";
		else if (i + 1 < argc)
			value = argv[++i];
		if (!value)
			return ERR(CONFIG, "--%s needs %s", o->key, o->argument);
		if ((o->offset == AT(config_file)) == only_config)
			TRY(set(c, o, storage, str_of(value), CONFIG_ARGV));
	}
	return OK;
}

/* ---- what is worked out ---- */

static const char *env_get(char *const *env, const char *name)
{
	size_t n = strlen(name);

	for (; env && *env; env++)
		if (strncmp(*env, name, n) == 0 && (*env)[n] == '=')
			return (*env)[n + 1] ? *env + n + 1 : NULL;
	return NULL;
}

static FALLIBLE enum err set_printf(char **slot, const char *fmt, ...) PRINTF_LIKE(2, 3);
static FALLIBLE enum err set_printf(char **slot, const char *fmt, ...)
{
	char text[CONFIG_PATH_MAX * 2];
	va_list ap;

	va_start(ap, fmt);
	int n = vsnprintf(text, sizeof text, fmt, ap);
	va_end(ap);
	if (n < 0 || n >= CONFIG_PATH_MAX)
		return ERR(CONFIG, "a path is longer than %d bytes", CONFIG_PATH_MAX - 1);
	return set_text(slot, str_of(text));
}

static FALLIBLE enum err default_state_dir(struct config *c, char *const *env)
{
	const char *xdg = env_get(env, "XDG_STATE_HOME"), *home = env_get(env, "HOME");

	if (geteuid() == 0)
		return set_printf(&c->state_dir, "/var/lib/dcpd");
	if (xdg && xdg[0] == '/')
		return set_printf(&c->state_dir, "%s/dcpd", xdg);
	if (home && home[0] == '/')
		return set_printf(&c->state_dir, "%s/.local/state/dcpd", home);
	return ERR(CONFIG, "state-dir: neither given nor to be found from XDG_STATE_HOME or HOME");
}

/* A system service's socket is for its group. */
static FALLIBLE enum err default_group(struct config *c, char *const *env)
{
	if (!env_get(env, "RUNTIME_DIRECTORY") || c->allow_group || !getgrnam("dcpd"))
		return OK;
	return set_printf(&c->allow_group, "dcpd");
}

static FALLIBLE enum err default_listen(struct config *c, char *const *env)
{
	const char *run = env_get(env, "RUNTIME_DIRECTORY");
	char text[CONFIG_PATH_MAX + 32];
	int n = run ? snprintf(text, sizeof text, "unix:%s/dcpd.sock", run) :
		      snprintf(text, sizeof text, "unix:%s/dcpd.sock", c->state_dir);

	TRY(list_add(&c->listen, (struct str){ text, (size_t)n }));
	return list_add(&c->listen, STR("127.0.0.1:8427"));
}

static FALLIBLE enum err default_worker(struct config *c)
{
	char self[CONFIG_PATH_MAX];
	ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);

	if (n <= 0)
		return ERR_SYS(CONFIG, "worker-path: cannot find this program");
	self[n] = '\0';
	char *slash = strrchr(self, '/');
	if (slash)
		*slash = '\0';
	return set_printf(&c->worker_path, "%s/dcpd-worker", self);
}

static FALLIBLE enum err derive(struct config *c, char *const *env)
{
	cpu_set_t cpus;

	if (!c->state_dir)
		TRY(default_state_dir(c, env));
	if (c->state_dir[0] != '/')
		return ERR(CONFIG, "state-dir: \"%s\" is not an absolute path", c->state_dir);
	if (c->listen.count == 0)
		TRY(default_listen(c, env));
	TRY(default_group(c, env));
	TRY(config_access_derive(c, env_get(env, "RUNTIME_DIRECTORY") != NULL));
	if (c->workers == 0)
		c->workers = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? (uint64_t)CPU_COUNT(&cpus) : 2;
	if (c->workers < 2)
		c->workers = 2;
	if (c->workers > 1024)
		return ERR(CONFIG, "workers: more than 1024");
	if (!c->worker_path)
		TRY(default_worker(c));
	if (!c->tls_cert != !c->tls_key)
		return ERR(CONFIG, "tls-cert and tls-key go together");
	for (uint32_t i = 0; i < c->storage.count; i++)
		for (uint32_t k = 0; k < i; k++)
			if (strcspn(c->storage.items[i], "=") == strcspn(c->storage.items[k], "=") &&
			    strncmp(c->storage.items[i], c->storage.items[k], strcspn(c->storage.items[i], "=") + 1) == 0)
				return ERR(CONFIG, "storage \"%s\": the name is used twice", c->storage.items[i]);
	TRY(config_tier_derive(c));
	TRY(config_s3_derive(c));
	TRY(config_cluster_check(c));
	TRY(set_printf(&c->journal_file, "%s/journal.db", c->state_dir));
	TRY(set_printf(&c->token_file, "%s/token", c->state_dir));
	return set_printf(&c->tokens_file, "%s/tokens", c->state_dir);
}

/* Help, manual and version are the same whatever the environment and the file say, right or wrong. */
static bool only_prints(int argc, char *const *argv)
{
	for (int i = 1; i < argc; i++)
		if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "--version") == 0 || strncmp(argv[i], "--manual", 8) == 0)
			return true;
	return false;
}

static FALLIBLE enum err load(struct config *c, int argc, char *const *argv, char *const *env)
{
	for (size_t i = 0; i < OPTIONS; i++)
		if (table[i].fallback)
			TRY(set(c, &table[i], STR(""), str_of(table[i].fallback), CONFIG_DEFAULT));
	if (only_prints(argc, argv))
		return read_argv(c, argc, argv, false);
	TRY(read_env(c, env, true));
	TRY(read_argv(c, argc, argv, true));
	if (c->config_file)
		TRY(read_file(c));
	TRY(read_env(c, env, false));
	TRY(read_argv(c, argc, argv, false));
	return derive(c, env);
}

FALLIBLE enum err config_load(int argc, char *const *argv, char *const *env, struct config **out)
{
	struct config *c = mem_zalloc(1, sizeof *c);

	NEED(c, "cannot keep the configuration");
	enum err e = load(c, argc, argv, env);
	if (e) {
		config_free(c);
		return e;
	}
	*out = c;
	return OK;
}

void config_free(struct config *c)
{
	if (!c)
		return;
	for (size_t i = 0; i < OPTIONS; i++) {
		char *field = (char *)c + table[i].offset;
		if (table[i].kind == TEXT || table[i].kind == ENGINE)
			mem_free(*(char **)field);
		else if (table[i].kind == LIST)
			list_clear((struct config_list *)field);
	}
	list_clear(&c->storage_option);
	mem_free(c->journal_file);
	mem_free(c->token_file);
	mem_free(c->tokens_file);
	mem_free(c);
}

/* ---- showing it ---- */

static void print_one(const struct config *c, const struct option *o, FILE *to)
{
	const char *field = (const char *)c + o->offset, *from = source_names[c->from[o - table]];
	const struct config_list *list = (const struct config_list *)field;

	switch (o->kind) {
	case TEXT:
	case ENGINE:
		if (*(char *const *)field)
			fprintf(to, "%s = %s    # %s\n", o->key, *(char *const *)field, from);
		break;
	case LIST:
		for (uint32_t i = 0; i < list->count; i++)
			fprintf(to, "%s = %s    # %s\n", o->key, list->items[i], from);
		break;
	case BYTES:
	case COUNT:
		fprintf(to, "%s = %ju    # %s\n", o->key, (uintmax_t)*(const uint64_t *)field, from);
		break;
	case DURATION:
		fprintf(to, "%s = %jdms    # %s\n", o->key, (intmax_t)*(const int64_t *)field, from);
		break;
	case KEEP:
		fprintf(to, "%s = %ju/%jdms    # %s\n", o->key, (uintmax_t)c->keep_jobs, (intmax_t)c->keep_jobs_ms, from);
		break;
	case FORMAT:
		fprintf(to, "%s = %s    # %s\n", o->key, *(const bool *)field ? "json" : "logfmt", from);
		break;
	case MODE:
		fprintf(to, "%s = %04jo    # %s\n", o->key, (uintmax_t)*(const uint64_t *)field, from);
		break;
	case FLAG:
		fprintf(to, "%s = %s    # %s\n", o->key, *(const bool *)field ? "true" : "false", from);
		break;
	}
}

void config_print(const struct config *c, FILE *to)
{
	for (size_t i = 0; i < OPTIONS; i++)
		if (!is_command(&table[i]))
			print_one(c, &table[i], to);
	for (uint32_t i = 0; i < c->storage_option.count; i++) {
		const char *item = c->storage_option.items[i];
		fprintf(to, "%.*s = %s\n", (int)strcspn(item, "="), item, strchr(item, '=') + 1);
	}
}

void config_help(FILE *to)
{
	fprintf(to, "usage: dcpd [OPTION]…\n\n"
		    "The distributed checkpoint daemon: saves, loads, reshards and verifies model checkpoints.\n"
		    "Options may also stand in a file (--config) as `key = value`, or in the environment (DCPD_SHM_LIMIT=…).\n\n");
	for (size_t i = 0; i < OPTIONS; i++) {
		char left[64];
		snprintf(left, sizeof left, "--%s%s%s", table[i].key, table[i].argument ? " " : "",
			 table[i].argument ? table[i].argument : "");
		fprintf(to, "  %-32s %s", left, table[i].doc);
		if (table[i].fallback && table[i].kind != FLAG)
			fprintf(to, " [%s]", table[i].fallback);
		fputc('\n', to);
	}
}
