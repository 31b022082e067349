/* copied.c: see copied.h. */
#include "store/copied.h"

#include <time.h>

#include "base/clock.h"
#include "base/jval.h"
#include "base/num.h"
#include "store/manifest.h"
#include "store/record.h"
#include "store/staging.h"

enum { HEAD_MAX = 16 << 10 };   /* of a page: what stands before its files */

static FALLIBLE enum err put_files(struct buf *b, const struct copied *c)
{
	buf_puts(b, ",\"files\":[");
	for (uint64_t i = 0; i < c->files->files.n; i++) {
		const struct contents_file *f = &c->files->files.v[i];
		int64_t mtime = 0;
		if (c->staged)
			TRY(staging_mtime(c->staged, c->staged->target, &mtime));
		buf_puts(b, i ? ",\n{\"name\":" : "\n{\"name\":");
		buf_json_str(b, c->staged ? str_of(c->staged->target) : f->name);
		buf_printf(b, ",\"bytes\":%jd", (intmax_t)f->st.st_size);
		if (mtime)
			buf_printf(b, ",\"mtime_ns\":%jd", (intmax_t)mtime);
		buf_puts(b, ",\"items\":[]}");
	}
	buf_puts(b, "]");
	return OK;
}

enum err copied_put(struct buf *b, const struct copied *c)
{
	const struct manifest_metadata none = { .name = "", .save_id = "" };
	time_t now = clock_wall_ms() / 1000;
	char stamp[40] = "";
	struct tm tm;

	if (gmtime_r(&now, &tm))
		strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%SZ", &tm);
	buf_printf(b, "{\"dcpd\":1,\"job\":\"%s\",\"attempt\":%ju,\"kind\":\"%s\",\"created_at\":\"%s\",\"uid\":%u,\"world_size\":%ju,"
		      "\"bytes\":%ju,\"metadata\":", c->job, (uintmax_t)c->attempt, c->kind, stamp, c->uid, (uintmax_t)c->world_size,
		   (uintmax_t)c->files->bytes);
	manifest_put_metadata(b, &none);
	if (c->record && json_object_size(c->record))
		TRY(record_put(b, c->record));
	buf_json_member(b, ",\"source\":{\"storage\":", str_of(c->storage));
	buf_json_member(b, ",\"name\":", str_of(c->name));
	buf_json_member(b, ",\"etag\":", str_of(c->identity));
	if (c->source_job[0])
		buf_json_member(b, ",\"job\":", str_of(c->source_job));
	buf_puts(b, "}");
	TRY(put_files(b, c));
	return manifest_put_self(b);
}

/* The member "source" of a page's head: the page itself lists all files. NULL: there is none. */
static json_t *source_in(char *head, size_t n)
{
	static const char key[] = ",\"source\":", behind[] = "},\"files\":[";
	char *at = memmem(head, n, key, sizeof key - 1);
	char *end = at ? memmem(at, n - (size_t)(at - head), behind, sizeof behind - 1) : NULL;
	json_t *doc = NULL;

	if (!end)
		return NULL;
	at += sizeof key - 1;
	if (jval_parse((struct str){ at, (size_t)(end - at) + 1 }, &doc))
		err_clear();
	return doc;
}

static FALLIBLE enum err read_head(struct store_at folder, const char *name, char head[HEAD_MAX], size_t *n_out)
{
	CLEANUP(store_close) struct store_at page = STORE_NOTHING;
	struct stat st;

	TRY(store_open_file(folder, name, STORE_READ, &page));
	TRY(store_stat(page, "", &st));
	*n_out = S_ISREG(st.st_mode) ? (size_t)num_min((uint64_t)st.st_size, HEAD_MAX) : 0;
	return store_read(page, head, *n_out, 0, name);
}

void copied_put_source(struct store_at folder, const char *page, struct buf *out)
{
	static const char *const keys[] = { "storage", "name", "etag", "job" };
	char head[HEAD_MAX];
	size_t n = 0;

	if (read_head(folder, page, head, &n)) {
		err_clear();
		return;
	}
	CLEANUP(jval_drop) json_t *source = source_in(head, n);
	if (!json_is_object(source))
		return;
	buf_puts(out, ",\"copied_from\":{");
	for (size_t i = 0, put = 0; i < sizeof keys / sizeof *keys; i++) {
		const char *text = json_string_value(json_object_get(source, keys[i]));
		if (!text)
			continue;
		buf_printf(out, "%s\"%s\":", put++ ? "," : "", keys[i]);
		buf_json_str(out, str_of(text));
	}
	buf_puts(out, "}");
}
