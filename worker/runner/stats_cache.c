/* stats_cache.c: see stats_cache.h. Entries leave out empty bins, and so take a few hundred bytes each. */
#include "runner/stats_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include "base/num.h"
#include "io/digest.h"
#include "os/fs.h"

/* An entry, in the file as in memory: the file is of this host, and of builds with the same MAGIC. */
struct stats_kept {
	struct stats_head {
		unsigned char xxh3_128[16]; /* of what follows */
		uint32_t magic, bin_count;
	} head;
	unsigned char key[16];
	struct stats stats;
	struct bin {
		uint64_t index, count;
	} bins[];                      /* those that are not empty */
};
enum { VERSION = 1, MAGIC = 0x53544100 ^ (VERSION << 16) ^ (int)sizeof(struct stats_kept) ^ (STATS_BINS << 8) };

static uint64_t bytes_of(uint32_t bin_count)
{
	return sizeof(struct stats_kept) + bin_count * sizeof(struct bin);
}

void stats_key_of(const struct sdict *sd, const struct sd_tensor *t, const struct manifest *m, struct stats_key *out)
{
	unsigned char dtype = (unsigned char)t->dtype;
	struct digest_stream stream;
	struct digest got;

	out->known = m != NULL;
	digest_begin_one(&stream, DIGEST_XXH3);
	digest_add(&stream, &dtype, 1);
	for (uint64_t i = t->first_chunk; out->known && i < t->first_chunk + t->chunk_count; i++) {
		const struct sd_loc *loc = &sd->chunks[i].loc;
		const struct manifest_item *item = manifest_find(m, sd->files[loc->file].name, loc->offset, loc->length);
		out->known = item && !item->raw && item->digest_count;
		if (out->known)
			digest_add(&stream, m->digests.v + item->digest_at, item->digest_count * sizeof *m->digests.v);
	}
	digest_end(&stream, &got);
	memcpy(out->xxh3_128, got.xxh3_128, sizeof out->xxh3_128);
}

static struct str key_str(const unsigned char key[16])
{
	return (struct str){ (const char *)key, 16 };
}

bool stats_cache_get(const struct stats_cache *c, const struct stats_key *key, struct stats *out, uint64_t bins[STATS_BINS])
{
	const struct stats_kept *k = key->known ? map_object(&c->kept, key_str(key->xxh3_128)) : NULL;

	if (!k)
		return false;
	*out = k->stats;
	memset(bins, 0, STATS_BINS * sizeof *bins);
	for (uint32_t b = 0; b < k->head.bin_count; b++)
		bins[k->bins[b].index] = k->bins[b].count;
	return true;
}

static void forget(struct stats_cache *c)
{
	struct stats_kept *k;

	map_each(&c->kept, k)
		mem_free(k);
	map_free(&c->kept);
	c->bytes = 0;
}

static struct stats_kept *kept_new(const struct stats_key *key, const struct stats *s, const uint64_t *bins)
{
	uint32_t count = 0;

	for (unsigned b = 0; b < STATS_BINS; b++)
		count += bins[b] != 0;
	struct stats_kept *k = mem_zalloc(1, bytes_of(count));
	if (!k)
		return NULL;
	k->head.magic = MAGIC;
	memcpy(k->key, key->xxh3_128, sizeof k->key);
	k->stats = *s;
	for (unsigned b = 0; b < STATS_BINS; b++)
		if (bins[b])
			k->bins[k->head.bin_count++] = (struct bin){ b, bins[b] };
	return k;
}

/* Takes *k over. False: it is there already, or there is no memory. */
static bool add(struct stats_cache *c, struct stats_kept *k)
{
	uint64_t bytes = bytes_of(k->head.bin_count);

	if (c->bytes + bytes > STATS_CACHE_BYTES)
		forget(c);
	if (map_object(&c->kept, key_str(k->key)) || map_add(&c->kept, key_str(k->key), k)) {
		err_clear();
		mem_free(k);
		return false;
	}
	c->bytes += bytes;
	return true;
}

/* ---- the file: a failure of it is a cache that knows less ---- */

static void hash(const struct stats_kept *k, struct digest *out)
{
	struct digest_stream stream;

	digest_begin_one(&stream, DIGEST_XXH3);
	digest_add(&stream, (const char *)k + sizeof k->head.xxh3_128, bytes_of(k->head.bin_count) - sizeof k->head.xxh3_128);
	digest_end(&stream, out);
}

static bool is_sound(const struct stats_kept *k)
{
	struct digest got;

	hash(k, &got);
	for (uint32_t b = 0; b < k->head.bin_count; b++)
		if (k->bins[b].index >= STATS_BINS)
			return false;
	return memcmp(got.xxh3_128, k->head.xxh3_128, sizeof k->head.xxh3_128) == 0;
}

/* The entry at `at` of the file's `end` bytes. False: it is damaged, or not all there. */
static bool read_one(const struct stats_cache *c, uint64_t at, uint64_t end, struct stats_kept **out)
{
	struct stats_head head;
	struct stats_kept *k = NULL;

	bool good = num_inside(at, sizeof head, end) && fs_pread(c->fd, &head, sizeof head, at, "") == OK && head.magic == MAGIC &&
		    head.bin_count <= STATS_BINS && num_inside(at, bytes_of(head.bin_count), end);
	if (good)
		k = mem_alloc(bytes_of(head.bin_count));
	good = k && fs_pread(c->fd, k, bytes_of(head.bin_count), at, "") == OK && memcmp(&head, k, sizeof head) == 0 && is_sound(k);
	if (!good) {
		mem_free(k);
		err_clear();
		return false;
	}
	*out = k;
	return true;
}

static uint64_t file_bytes(const struct stats_cache *c)
{
	struct stat st;

	return c->has_file && fstat(c->fd, &st) == 0 && st.st_size > 0 ? (uint64_t)st.st_size : 0;
}

static void cut(struct stats_cache *c, uint64_t at)
{
	c->read_to = ftruncate(c->fd, (off_t)at) == 0 ? at : 0; /* else it is looked at again */
}

void stats_cache_keep_in(struct stats_cache *c, int fd)
{
	c->has_file = true;
	c->fd = fd;
}

void stats_cache_read(struct stats_cache *c)
{
	uint64_t end = file_bytes(c);
	struct stats_kept *k;

	if (end < c->read_to) /* another gang began it anew */
		c->read_to = 0;
	while (c->read_to < end) {
		if (!read_one(c, c->read_to, end, &k)) {
			cut(c, c->read_to);
			return;
		}
		c->read_to += bytes_of(k->head.bin_count);
		(void)add(c, k);
	}
}

static void append(struct stats_cache *c, struct stats_kept *k)
{
	uint64_t bytes = bytes_of(k->head.bin_count), at = file_bytes(c);
	struct digest digest;

	if (!c->has_file)
		return;
	hash(k, &digest);
	memcpy(k->head.xxh3_128, digest.xxh3_128, sizeof k->head.xxh3_128);
	if (at + bytes > STATS_CACHE_BYTES)
		cut(c, 0);
	if (fs_pwrite(c->fd, k, bytes, at, "")) /* O_APPEND: at the end, wherever that is by now */
		err_clear();
}

void stats_cache_put(struct stats_cache *c, const struct stats_key *key, const struct stats *s, const uint64_t bins[STATS_BINS])
{
	if (!key->known || map_object(&c->kept, key_str(key->xxh3_128)))
		return;
	struct stats_kept *k = kept_new(key, s, bins);
	if (k && add(c, k))
		append(c, k);
}

void stats_cache_free(struct stats_cache *c)
{
	forget(c);
	if (c->has_file)
		fs_drop(&c->fd);
	*c = (struct stats_cache){ 0 };
}
