/* lookup_kept.c: see lookup_kept.h. */
#include "query/lookup_kept.h"

#include <sys/stat.h>
#include <unistd.h>

#include "base/num.h"
#include "ctl/build_id.h"
#include "io/digest.h"
#include "os/fs.h"

/* VERSION grows with whatever makes a checkpoint's record another one. */
enum { VERSION = 2, ENTRY_BYTES_MAX = 16 << 20, FILE_BYTES_MAX = 512 << 20, READ_BYTES = 1 << 20, WASTED_MIN = 1 << 20 };

/* An entry in the file: this, and texts, each behind its length: name, format, digest, noted, etag, time, record; of each metric the key,
 * behind its value; of each label key and value. */
struct kept {
	struct kept_head {
		unsigned char xxh3_128[16]; /* of what follows */
		uint64_t magic;
		uint64_t bytes;
	} head;
	struct lookup_mark mark;
	int64_t step, at_ms, of_ms;
	uint64_t size, world_size, brief;
	uint32_t format, metric_count, label_count;
	uint16_t is_held, is_dcpd;
	unsigned char told[16];
};

static uint64_t magic(void)
{
	unsigned char xxh3_128[16];
	uint64_t build;

	digest_xxh3(BUILD_ID, sizeof BUILD_ID, xxh3_128);
	memcpy(&build, xxh3_128, sizeof build);
	return build ^ (VERSION << 16) ^ sizeof(struct kept);
}

/* ---- an entry as bytes ---- */

static void put_text(struct buf *b, struct str s)
{
	buf_le32(b, (uint32_t)s.n);
	buf_put(b, s.p, s.n);
}

static void put_texts(struct buf *b, const struct lookup_entry *e)
{
	const struct checkpoint_facts *f = &e->facts;
	const struct str texts[] = { f->name, f->format, f->digest, e->noted, e->etag, e->time, e->record };

	each(s, texts, sizeof texts / sizeof *texts)
		put_text(b, *s);
	each(m, f->metrics, f->metric_count) {
		buf_put(b, &m->value, sizeof m->value);
		put_text(b, m->key);
	}
	each(l, f->labels, f->label_count) {
		put_text(b, l->key);
		put_text(b, l->value);
	}
}

/* The bytes that it took; 0: there is no memory. */
static uint64_t put_entry(struct buf *b, const struct lookup_entry *e)
{
	const struct checkpoint_facts *f = &e->facts;
	struct kept kept;
	size_t at = b->len;

	memset(&kept, 0, sizeof kept); /* its gaps, too */
	kept.mark = e->mark;
	kept.step = f->step;
	kept.at_ms = f->at_ms;
	kept.of_ms = f->of_ms;
	kept.size = f->bytes;
	kept.world_size = f->world_size;
	kept.brief = e->brief;
	kept.format = (uint32_t)e->format;
	kept.metric_count = f->metric_count;
	kept.label_count = f->label_count;
	kept.is_held = f->is_held;
	kept.is_dcpd = f->is_dcpd;
	memcpy(kept.told, e->told, sizeof kept.told);
	buf_put(b, &kept, sizeof kept);
	put_texts(b, e);
	if (b->failed)
		return 0;
	uint64_t bytes = b->len - at;
	struct kept_head head = { .magic = magic(), .bytes = bytes };
	memcpy(b->p + at, &head, sizeof head);
	digest_xxh3(b->p + at + sizeof head.xxh3_128, bytes - sizeof head.xxh3_128, b->p + at);
	return bytes;
}

/* The rest of an entry's bytes. */
struct rest {
	const unsigned char *p;
	uint64_t n;
};

static bool take(struct rest *r, void *out, uint64_t n)
{
	if (n > r->n)
		return false;
	memcpy(out, r->p, n);
	*r = (struct rest){ r->p + n, r->n - n };
	return true;
}

static bool take_text(struct rest *r, struct str *out)
{
	uint32_t n;

	if (!take(r, &n, sizeof n) || n > r->n)
		return false;
	*out = (struct str){ (const char *)r->p, n };
	*r = (struct rest){ r->p + n, r->n - n };
	return true;
}

static bool take_texts(struct rest *r, struct lookup_entry *e, struct checkpoint_metric *metrics, struct checkpoint_label *labels)
{
	struct checkpoint_facts *f = &e->facts;
	bool good = take_text(r, &f->name) && take_text(r, &f->format) && take_text(r, &f->digest) && take_text(r, &e->noted) &&
		    take_text(r, &e->etag) && take_text(r, &e->time) && take_text(r, &e->record);

	for (uint32_t i = 0; good && i < f->metric_count; i++)
		good = take(r, &metrics[i].value, sizeof metrics[i].value) && take_text(r, &metrics[i].key);
	for (uint32_t i = 0; good && i < f->label_count; i++)
		good = take_text(r, &labels[i].key) && take_text(r, &labels[i].value);
	f->metrics = metrics;
	f->labels = labels;
	return good && r->n == 0 && f->name.n > 0 && e->brief <= e->record.n;
}

/* Of bytes whose digest is right. NULL: they are no entry all the same, or there is no memory. */
static struct lookup_entry *entry_of(const unsigned char *p, uint64_t n)
{
	struct rest r = { p, n };
	struct lookup_entry *out = NULL;
	struct kept kept;

	if (!take(&r, &kept, sizeof kept) || kept.metric_count > r.n || kept.label_count > r.n || kept.format >= FORMAT_COUNT)
		return NULL;
	CLEANUP(mem_free_ptr) struct checkpoint_metric *metrics = mem_zalloc(kept.metric_count, sizeof *metrics);
	CLEANUP(mem_free_ptr) struct checkpoint_label *labels = mem_zalloc(kept.label_count, sizeof *labels);
	struct lookup_entry e = { .mark = kept.mark, .settled = true, .format = (enum format)kept.format, .brief = kept.brief,
				  .kept_bytes = n };
	e.facts = (struct checkpoint_facts){ .step = kept.step, .at_ms = kept.at_ms,
					     .of_ms = kept.of_ms, .bytes = kept.size, .world_size = kept.world_size,
					     .is_held = kept.is_held, .is_dcpd = kept.is_dcpd, .verified = "",
					     .metric_count = kept.metric_count, .label_count = kept.label_count };
	memcpy(e.told, kept.told, sizeof e.told);
	bool good = (!kept.metric_count || metrics) && (!kept.label_count || labels) && take_texts(&r, &e, metrics, labels);
	if (!good || lookup_entry_pack(&e, &out))
		err_clear();
	return out;
}

/* ---- the file ---- */

void lookup_kept_in(struct lookup_kept *k, int fd)
{
	k->has_file = true;
	k->fd = fd;
	k->news.max = FILE_BYTES_MAX;
}

void lookup_kept_drop(struct lookup_kept *k)
{
	struct lookup_entry *e;

	map_each(&k->known, e) {
		k->wasted += e->kept_bytes;
		mem_free(e);
	}
	map_free(&k->known);
	k->known = (struct map){ 0 };
}

void lookup_kept_forget(struct lookup_kept *k)
{
	lookup_kept_drop(k);
	k->was_read = false;
}

void lookup_kept_free(struct lookup_kept *k)
{
	lookup_kept_drop(k);
	buf_free(&k->news);
	if (k->has_file)
		fs_drop(&k->fd);
	*k = (struct lookup_kept){ 0 };
}

static void cut(struct lookup_kept *k, uint64_t at)
{
	k->has_file = ftruncate(k->fd, (off_t)at) == 0;
	k->bytes = at;
}

/* A later entry is the newer one. */
static void add_known(struct lookup_kept *k, struct lookup_entry *e)
{
	struct lookup_entry *old = map_object(&k->known, e->facts.name);

	if (old) {
		k->wasted += old->kept_bytes;
		map_remove(&k->known, e->facts.name);
		mem_free(old);
	}
	if (map_add(&k->known, e->facts.name, e)) {
		err_clear();
		mem_free(e);
	}
}

/* The bytes of the whole entry at the begin of `n` bytes: 0: there are too few of them; *bad: it is none. */
static uint64_t whole_entry(const unsigned char *p, uint64_t n, bool *bad)
{
	unsigned char got[16];
	struct kept_head head;

	*bad = false;
	if (n < sizeof head)
		return 0;
	memcpy(&head, p, sizeof head);
	*bad = head.magic != magic() || head.bytes < sizeof(struct kept) || head.bytes > ENTRY_BYTES_MAX;
	if (*bad || head.bytes > n)
		return 0;
	digest_xxh3(p + sizeof got, head.bytes - sizeof got, got);
	*bad = memcmp(got, head.xxh3_128, sizeof got) != 0;
	return *bad ? 0 : head.bytes;
}

/* Takes whole entries from the bytes read, and leaves the rest in front. False: there is one that is none. */
static bool take_entries(struct lookup_kept *k, struct buf *read)
{
	uint64_t at = 0, n;
	bool bad = false;

	while ((n = whole_entry(read->p + at, read->len - at, &bad))) {
		struct lookup_entry *e = entry_of(read->p + at, n);
		if (e)
			add_known(k, e);
		else
			k->wasted += n;
		at += n;
	}
	k->bytes += at;
	memmove(read->p, read->p + at, read->len - at);
	read->len -= at;
	return !bad;
}

void lookup_kept_read(struct lookup_kept *k)
{
	CLEANUP(buf_free) struct buf read = BUF_INIT(ENTRY_BYTES_MAX + READ_BYTES);
	unsigned char *to;
	struct stat st;

	if (!k->has_file || k->was_read)
		return;
	k->was_read = true;
	k->bytes = k->wasted = 0;
	uint64_t end = fstat(k->fd, &st) == 0 && st.st_size > 0 ? (uint64_t)st.st_size : 0;
	bool good = end <= FILE_BYTES_MAX;
	for (uint64_t at = 0; good && at < end;) {
		uint64_t n = num_min(end - at, READ_BYTES);
		good = buf_reserve(&read, n, &to) == OK && fs_pread(k->fd, to, n, at, "") == OK && take_entries(k, &read);
		at += n;
	}
	err_clear();
	if (!good || read.len)
		cut(k, k->bytes);
}

bool lookup_kept_has(const struct lookup_kept *k, const char *name)
{
	return k->known.raw.count && map_object(&k->known, str_of(name));
}

struct lookup_entry *lookup_kept_take(struct lookup_kept *k, const char *name, const struct lookup_mark *mark)
{
	struct lookup_entry *e = map_object(&k->known, str_of(name));

	map_remove(&k->known, str_of(name));
	if (lookup_mark_same(&e->mark, mark))
		return e;
	k->wasted += e->kept_bytes;
	mem_free(e);
	return NULL;
}

void lookup_kept_waste(struct lookup_kept *k, const struct lookup_entry *e)
{
	k->wasted += e->kept_bytes;
}

void lookup_kept_put(struct lookup_kept *k, struct lookup_entry *e)
{
	if (!k->has_file)
		return;
	k->wasted += e->kept_bytes;
	e->kept_bytes = put_entry(&k->news, e);
}

static void put_folder(struct lookup_kept *k, const struct lookup_dir *d)
{
	each(c, d->children.v, d->children.n) {
		if (c->dir)
			put_folder(k, c->dir);
		else if (c->entry && c->entry->kept_bytes)
			c->entry->kept_bytes = put_entry(&k->news, c->entry);
	}
}

/* Writes the file anew, with what is known by now. */
static void put_all(struct lookup_kept *k, const struct lookup_tree *t)
{
	struct lookup_entry *e;

	cut(k, 0);
	k->news.len = 0;
	k->wasted = 0;
	if (t->top)
		put_folder(k, t->top);
	map_each(&k->known, e)
		e->kept_bytes = put_entry(&k->news, e);
}

void lookup_kept_flush(struct lookup_kept *k, const struct lookup_tree *t)
{
	if (!k->has_file || (k->news.len == 0 && !k->news.failed))
		return;
	if (!k->news.failed && k->wasted > WASTED_MIN && k->wasted > (k->bytes + k->news.len) / 2)
		put_all(k, t);
	bool fits = !k->news.failed && k->news.len <= FILE_BYTES_MAX - num_min(k->bytes, FILE_BYTES_MAX);
	if (k->has_file && fits && fs_pwrite(k->fd, k->news.p, k->news.len, k->bytes, "") == OK) /* O_APPEND: at the end */
		k->bytes += k->news.len;
	else if (k->has_file)
		cut(k, fits ? k->bytes : 0); /* no part of an entry is left there */
	err_clear();
	buf_free(&k->news);
	k->news = BUF_INIT(FILE_BYTES_MAX);
}
