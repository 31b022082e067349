/* fill.c: plays a trainer: makes a state dict in shared memory through the daemon, fills it and seals it.
 *
 *     fill NAME RANKS TENSORS MIB [GENERATION]      MIB: of each tensor, all ranks together; DCPD_URL=unix:///path
 *
 * Tensors are int64 [rows, 4096], `layers.N.weight`, rows cut over the ranks. Word w of tensor t is splitmix64((t << 40) + w), so
 * that any program can tell what must be where. Prints the seconds that the copy took. In C because the quickstart runs on
 * machines without Python, and because gigabytes are to be filled at the speed of memory. */
#include <curl/curl.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/buf.h"

enum { COLUMNS = 4096, ROW_BYTES = COLUMNS * 8, PAGE = 4096, LEASE_SECONDS = 7200 /* no process renews it: longer than a bench */ };

struct plan {
	const char *name;
	uint64_t ranks, tensors, rows;  /* rows of each tensor */
	int64_t generation;
	double seconds;                 /* of copying */
};

static _Noreturn void die(const char *what, const char *why)
{
	fprintf(stderr, "fill: %s: %s\n", what, why);
	exit(1);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static uint64_t splitmix64(uint64_t x)
{
	x += 0x9e3779b97f4a7c15u;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return x ^ (x >> 31);
}

static size_t keep(char *p, size_t one, size_t n, void *user)
{
	buf_put(user, p, one * n);
	return one * n;
}

/* POSTs JSON; the answer, or the end of the program with the daemon's own words. */
static json_t *post(const char *path, json_t *body_new)
{
	const char *daemon_url = getenv("DCPD_URL");
	CURL *c = curl_easy_init();
	struct buf answer = BUF_INIT(1 << 20), url = BUF_INIT(4096);
	struct curl_slist *type = curl_slist_append(NULL, "Content-Type: application/json");
	char *body = json_dumps(body_new, JSON_COMPACT);
	long status = 0;

	if (!daemon_url || strncmp(daemon_url, "unix://", 7) != 0)
		die("DCPD_URL", "must be unix:///path");
	buf_printf(&url, "http://localhost%s", path);
	buf_putc(&url, '\0');
	if (!c || !type || !body || buf_status(&url) != OK)
		die(path, "out of memory");
	curl_easy_setopt(c, CURLOPT_URL, (char *)url.p);
	curl_easy_setopt(c, CURLOPT_UNIX_SOCKET_PATH, daemon_url + 7);
	curl_easy_setopt(c, CURLOPT_HTTPHEADER, type);
	curl_easy_setopt(c, CURLOPT_POSTFIELDS, body);
	curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, keep);
	curl_easy_setopt(c, CURLOPT_WRITEDATA, &answer);
	CURLcode e = curl_easy_perform(c);
	if (e != CURLE_OK)
		die(path, curl_easy_strerror(e));
	curl_easy_getinfo(c, CURLINFO_RESPONSE_CODE, &status);
	buf_putc(&answer, '\0');
	if (status >= 300 || buf_status(&answer) != OK)
		die(path, (char *)answer.p);
	json_t *out = json_loads((char *)answer.p, 0, NULL);
	buf_free(&answer);
	buf_free(&url);
	curl_slist_free_all(type);
	curl_easy_cleanup(c);
	json_decref(body_new);
	free(body);
	return out;
}

/* The rank's part of every tensor: rows [*first, *first + count). */
static uint64_t rows_of(const struct plan *p, uint64_t rank, uint64_t *first)
{
	uint64_t step = (p->rows + p->ranks - 1) / p->ranks;

	*first = step * rank < p->rows ? step * rank : p->rows;
	return p->rows - *first < step ? p->rows - *first : step;
}

static void put_header(const struct plan *p, uint64_t rank, struct buf *head)
{
	struct buf meta = BUF_INIT(16 << 20);
	uint64_t first, count = rows_of(p, rank, &first), bytes = count * ROW_BYTES;

	buf_puts(&meta, "{\"version\":1,\"tensors\":{");
	for (uint64_t t = 0; t < p->tensors; t++)
		buf_printf(&meta, "%s\"layers.%ju.weight\":{\"fqn\":\"layers.%ju.weight\",\"global_shape\":[%ju,%d],"
				  "\"offsets\":[%ju,0]}",
			   t ? "," : "", (uintmax_t)t, (uintmax_t)t, (uintmax_t)p->rows, COLUMNS, (uintmax_t)first);
	buf_puts(&meta, "},\"values\":{\"step\":{\"json\":1}}}");
	buf_puts(head, "{\"__metadata__\":{\"dcpd\":");
	buf_json_str(head, (struct str){ (char *)meta.p, meta.len });
	buf_putc(head, '}');
	for (uint64_t t = 0; t < p->tensors; t++)
		buf_printf(head, ",\"layers.%ju.weight\":{\"dtype\":\"I64\",\"shape\":[%ju,%d],\"data_offsets\":[%ju,%ju]}",
			   (uintmax_t)t, (uintmax_t)count, COLUMNS, (uintmax_t)(t * bytes), (uintmax_t)((t + 1) * bytes));
	buf_putc(head, '}');
	buf_fill(head, ' ', PAGE - (8 + head->len) % PAGE);
	if (buf_status(&meta) != OK || buf_status(head) != OK)
		die("header", "too large");
	buf_free(&meta);
}

static void fill_rank(struct plan *p, uint64_t rank)
{
	struct buf head = BUF_INIT(64 << 20);
	uint64_t first, count = rows_of(p, rank, &first), words = count * COLUMNS, image;
	char path[512];

	put_header(p, rank, &head);
	image = 8 + head.len + p->tensors * words * 8;
	snprintf(path, sizeof path, "/v1/state-dicts/%s/ranks/%ju:reserve", p->name, (uintmax_t)rank);
	json_t *seg = post(path, json_pack("{s:I,s:I}", "bytes", (json_int_t)image, "generation", (json_int_t)p->generation));
	const char *segment = json_string_value(json_object_get(seg, "segment"));
	int fd = segment ? shm_open(segment, O_RDWR | O_CLOEXEC, 0) : -1;
	unsigned char *m = fd < 0 ? MAP_FAILED : mmap(NULL, image, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (m == MAP_FAILED)
		die(segment ? segment : path, "cannot map the segment");

	double start = now();
	uint64_t length = head.len, *data = (uint64_t *)(m + 8 + head.len);
	memcpy(m, &length, 8);
	memcpy(m + 8, head.p, head.len);
	for (uint64_t t = 0; t < p->tensors; t++)
		for (uint64_t w = 0; w < words; w++)
			data[t * words + w] = splitmix64((t << 40) + first * COLUMNS + w);
	p->seconds += now() - start;
	munmap(m, image);
	close(fd);
	json_decref(seg);
	snprintf(path, sizeof path, "/v1/state-dicts/%s/ranks/%ju:seal", p->name, (uintmax_t)rank);
	json_decref(post(path, json_pack("{s:I,s:I}", "generation", (json_int_t)p->generation, "image_bytes", (json_int_t)image)));
	buf_free(&head);
}

static uint64_t number(const char *text)
{
	uint64_t v;

	if (!str_to_u64(str_of(text), &v) || v == 0)
		die(text, "not a number above 0");
	return v;
}

int main(int argc, char **argv)
{
	if (argc < 5)
		die("usage", "fill NAME RANKS TENSORS MIB [GENERATION]");
	struct plan p = { .name = argv[1], .ranks = number(argv[2]), .tensors = number(argv[3]),
			  .rows = number(argv[4]) * ((1 << 20) / ROW_BYTES),
			  .generation = argc > 5 ? (int64_t)number(argv[5]) : 1 };

	if (p.generation == 1)
		json_decref(post("/v1/state-dicts", json_pack("{s:s,s:I,s:i,s:i}", "name", p.name, "world_size",
							      (json_int_t)p.ranks, "slots", 1, "lease_seconds", LEASE_SECONDS)));
	for (uint64_t r = 0; r < p.ranks; r++)
		fill_rank(&p, r);
	printf("%.3f\n", p.seconds);
	return 0;
}
