/* s3_tool.c: the S3 client by command lines, for tests.
 *
 *     s3_tool ENDPOINT BUCKET PREFIX [NAME=VALUE]...        reads commands from stdin, one a line, words between tabs
 *
 * Each command ends with one line "ok …" or "CODE text". Files are sent and filled through one mapping, as a worker's segments are. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/num.h"
#include "store/s3_client.h"

static struct s3 *s3;
static char *word[16];
static int words;

static const char *arg(int i)
{
	return i < words && word[i][0] ? word[i] : NULL;
}

static uint64_t number(int i)
{
	return arg(i) ? strtoull(arg(i), NULL, 10) : 0;
}

static void *map(const char *path, size_t *n, bool make)
{
	int fd = open(path, make ? O_RDWR | O_CREAT : O_RDONLY, 0600);
	struct stat st;

	if (fd < 0 || (make && ftruncate(fd, (off_t)*n) != 0) || fstat(fd, &st) != 0)
		exit(3);
	*n = (size_t)st.st_size;
	void *p = *n ? mmap(NULL, *n, make ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0) : "";
	close(fd);
	if (p == MAP_FAILED)
		exit(3);
	return p;
}

static enum err entry(void *user, struct str key, const struct s3_object *o)
{
	(void)user;
	if (o)
		printf("- %.*s\t%ju\t%s\t%jd\n", (int)key.n, key.p, (uintmax_t)o->bytes, o->etag, (intmax_t)o->mtime_ms);
	else
		printf("- %.*s\n", (int)key.n, key.p);
	return OK;
}

static struct s3_condition condition(int i)
{
	if (!arg(i))
		return S3_ALWAYS;
	return strcmp(arg(i), "none") == 0 ? (struct s3_condition){ S3_IF_NONE, NULL } : (struct s3_condition){ S3_IF_ETAG, arg(i) };
}

static enum err get(void)              /* get KEY OFFSET N FILE ETAG */
{
	size_t n = number(3);
	struct s3_object o;
	void *p = map(word[4], &n, true);
	enum err e = s3_get(s3, word[1], number(2), p, n, arg(5), NULL, &o);

	if (!e)
		printf("ok %ju\t%s\n", (uintmax_t)o.bytes, o.etag);
	return e;
}

static enum err get_all(void)          /* get_all KEY MAX */
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(number(2));
	struct s3_object o;

	TRY(s3_get_all(s3, word[1], NULL, &b, &o));
	printf("ok %ju\t%s\t%jd\t%.*s\n", (uintmax_t)o.bytes, o.etag, (intmax_t)o.mtime_ms, (int)b.len, b.p ? (const char *)b.p : "");
	return OK;
}

static enum err head(void)
{
	struct s3_object o;

	TRY(s3_head(s3, word[1], NULL, &o));
	printf("ok %ju\t%s\t%jd\n", (uintmax_t)o.bytes, o.etag, (intmax_t)o.mtime_ms);
	return OK;
}

static enum err put(void)              /* put KEY FILE CONDITION MARK */
{
	char etag[S3_ETAG_MAX];
	size_t n = 0;
	void *p = map(word[2], &n, false);

	TRY(s3_put(s3, word[1], p, n, condition(3), arg(4), NULL, etag));
	printf("ok %s\n", etag);
	return OK;
}

static enum err list(void)             /* list PREFIX DELIMITER AFTER MOST */
{
	TRY(s3_list(s3, words > 1 ? word[1] : "", arg(2) ? *arg(2) : 0, arg(3), number(4), NULL, entry, NULL));
	printf("ok\n");
	return OK;
}

static enum err delete_many(void)
{
	TRY(s3_delete_many(s3, (const char *const *)word + 1, NULL, (size_t)words - 1, NULL));
	printf("ok\n");
	return OK;
}

static char id[S3_UPLOAD_ID_MAX];
static struct s3_part parts[S3_PARTS_MAX];
static size_t part_count;

static enum err begin(void)            /* begin KEY */
{
	part_count = 0;
	TRY(s3_upload_begin(s3, word[1], NULL, NULL, id));
	printf("ok %s\n", id);
	return OK;
}

static enum err part(void)             /* part KEY FILE OFFSET N: as the next one */
{
	size_t n = 0;
	char *p = map(word[2], &n, false);

	TRY(s3_upload_part(s3, word[1], id, (uint32_t)part_count + 1, p + number(3), number(4), NULL, &parts[part_count]));
	printf("ok %s\n", parts[part_count++].etag);
	return OK;
}

static enum err part_copy(void)        /* part_copy KEY FROM OFFSET N */
{
	TRY(s3_upload_part_copy(s3, word[1], id, (uint32_t)part_count + 1, word[2], NULL, number(3), number(4), NULL, &parts[part_count]));
	printf("ok %s\n", parts[part_count++].etag);
	return OK;
}

static enum err complete(void)         /* complete KEY CONDITION */
{
	char etag[S3_ETAG_MAX];

	TRY(s3_upload_complete(s3, word[1], id, parts, part_count, condition(2), NULL, etag));
	printf("ok %s\n", etag);
	return OK;
}

static enum err abort_upload(void)     /* abort KEY ID */
{
	TRY(s3_upload_abort(s3, word[1], arg(2) ? word[2] : id, NULL));
	printf("ok\n");
	return OK;
}

static enum err found_upload(void *user, struct str key, const char *found, int64_t begun_ms)
{
	(void)user;
	printf("- %.*s\t%s\t%jd\n", (int)key.n, key.p, found, (intmax_t)begun_ms);
	return OK;
}

static enum err uploads(void)          /* uploads PREFIX */
{
	TRY(s3_uploads_list(s3, words > 1 ? word[1] : "", NULL, found_upload, NULL));
	printf("ok\n");
	return OK;
}

static enum err found_part(void *user, const struct s3_part *p)
{
	(void)user;
	parts[part_count++] = *p;
	printf("- %u\t%ju\t%s\t%d\t%08x\n", p->number, (uintmax_t)p->bytes, p->etag, p->has_crc, p->crc32);
	return OK;
}

static enum err resume(void)           /* resume KEY ID: lists its parts, to go on with */
{
	snprintf(id, sizeof id, "%s", word[2]);
	part_count = 0;
	TRY(s3_upload_parts_list(s3, word[1], id, NULL, found_part, NULL));
	printf("ok\n");
	return OK;
}

static enum err copy(void)             /* copy FROM TO ETAG MARK */
{
	char etag[S3_ETAG_MAX];

	TRY(s3_copy(s3, word[1], arg(3), word[2], arg(4), NULL, etag));
	printf("ok %s\n", etag);
	return OK;
}

/* together THREADS TIMES KEY: so many threads delete it so often each, all at once. */
static void *one_of_many(void *user)
{
	uint64_t *failed = user;

	for (uint64_t i = 0; i < number(2); i++)
		*failed += s3_delete(s3, word[3], NULL) != OK;
	return NULL;
}

static enum err together(void)
{
	pthread_t thread[64];
	uint64_t failed[64] = { 0 }, sum = 0, n = num_min(number(1), 64);

	for (uint64_t i = 0; i < n; i++)
		if (pthread_create(&thread[i], NULL, one_of_many, &failed[i]) != 0)
			exit(3);
	for (uint64_t i = 0; i < n; i++) {
		pthread_join(thread[i], NULL);
		sum += failed[i];
	}
	printf("ok %ju\n", (uintmax_t)sum);
	return sum ? ERR(STORAGE_IO, "%ju calls failed", (uintmax_t)sum) : OK;
}

static enum err probe(void)            /* probe KEY */
{
	TRY(s3_probe_conditions(s3, word[1], NULL));
	printf("ok\n");
	return OK;
}

static enum err delete(void)           /* delete KEY [ETAG] */
{
	TRY(arg(2) ? s3_delete_if(s3, word[1], arg(2), NULL) : s3_delete(s3, word[1], NULL));
	printf("ok\n");
	return OK;
}

static enum err counts(void)
{
	struct s3_counts c = s3_counts(s3);

	printf("ok %ju\t%ju\t%ju\t%ju\t%ju\n", (uintmax_t)c.sent_bytes, (uintmax_t)c.received_bytes, (uintmax_t)c.requests,
	       (uintmax_t)c.repeats, (uintmax_t)c.connections);
	return OK;
}

static const struct {
	const char *name;
	enum err (*run)(void);
} commands[] = {
	{ "get", get }, { "get_all", get_all }, { "head", head }, { "put", put }, { "list", list }, { "delete", delete },
	{ "delete_many", delete_many }, { "counts", counts }, { "begin", begin }, { "part", part }, { "part_copy", part_copy },
	{ "complete", complete }, { "abort", abort_upload }, { "uploads", uploads }, { "resume", resume },
	{ "copy", copy }, { "probe", probe },
	{ "together", together },
};

static bool address_ok(void *user, const struct sockaddr *a)
{
	const char *refused = user;
	char text[INET_ADDRSTRLEN] = "";

	inet_ntop(AF_INET, &((const struct sockaddr_in *)a)->sin_addr, text, sizeof text);
	return strcmp(text, refused) != 0;
}

static struct s3_config configured(int argc, char **argv)
{
	struct s3_config c = { .endpoint = argv[1], .bucket = argv[2], .prefix = argv[3], .path_style = true };

	for (int i = 4; i < argc; i++) {
		char *is = strchr(argv[i], '=');
		const char *v = is ? is + 1 : "";
		size_t n = is ? (size_t)(is - argv[i]) : 0;
#define IS(name) (n == sizeof(name) - 1 && memcmp(argv[i], name, n) == 0)
		if (IS("region"))
			c.region = v;
		else if (IS("virtual"))
			c.path_style = false;
		else if (IS("credentials"))
			c.credentials = (enum s3_credentials_from)strtol(v, NULL, 10);
		else if (IS("file"))
			c.credentials_file = v;
		else if (IS("profile"))
			c.profile = v;
		else if (IS("refuse")) {
			c.address_ok = address_ok;
			c.user = (void *)v;
		} else if (IS("connections"))
			c.connections = (uint32_t)strtoul(v, NULL, 10);
		else if (IS("stall_ms"))
			c.stall_ms = strtol(v, NULL, 10);
		else if (IS("connect_ms"))
			c.connect_ms = strtol(v, NULL, 10);
		else if (IS("call_ms"))
			c.call_ms = strtol(v, NULL, 10);
		else if (IS("tries"))
			c.tries = (uint32_t)strtoul(v, NULL, 10);
		else
			exit(2);
#undef IS
	}
	return c;
}

static void run(void)
{
	enum err e = ERR_UNKNOWN_KIND;

	for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
		if (strcmp(commands[i].name, word[0]) == 0) {
			e = commands[i].run();
			break;
		}
	if (e)
		printf("%s %s\n", err_code_name(e), err_last()->text);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	char *line = NULL;
	size_t room = 0;

	if (argc < 4)
		return 2;
	struct s3_config c = configured(argc, argv);
	if (s3_open(&c, &s3)) {
		printf("%s %s\n", err_code_name(err_last()->code), err_last()->text);
		return 1;
	}
	printf("ok\n");
	fflush(stdout);
	for (ssize_t n; (n = getline(&line, &room, stdin)) > 0;) {
		if (line[n - 1] == '\n')
			line[n - 1] = '\0';
		words = 0;
		for (char *at = line; at && words < 16;)
			word[words++] = strsep(&at, "\t");
		run();
	}
	s3_close(s3);
	return 0;
}
