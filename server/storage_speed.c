/* storage_speed.c: see storage_speed.h. A ring of minutes, made at the first traffic: of many storages most are idle. */
#include "server/storage_speed.h"

#include "base/clock.h"
#include "base/mem.h"

enum { MINUTE_MS = 60000, GROWTH_MINUTES_MIN = 10 };

struct minute {
	int64_t number;                /* since the monotonic clock's begin; another one's cell is empty */
	uint64_t bytes[2];
	int64_t ns[2];
	uint64_t free_bytes;           /* at the minute's last look */
	bool has_free;
};

struct storage_speed {
	struct minute minutes[STORAGE_SPEED_MINUTES];
};

void storage_speed_drop(struct storage_speed *s)
{
	mem_free(s);
}

/* The cell of this minute, empty if it was an older one's. NULL: no memory. */
static struct minute *minute_now(struct storage_speed **s, int64_t now_ms)
{
	int64_t number = now_ms / MINUTE_MS;

	*s = *s ? *s : mem_zalloc(1, sizeof **s);
	if (!*s)
		return NULL;
	struct minute *m = &(*s)->minutes[number % STORAGE_SPEED_MINUTES];
	if (m->number != number)
		*m = (struct minute){ .number = number };
	return m;
}

void storage_speed_count(struct storage_speed **s, int64_t now_ms, bool written, uint64_t bytes, int64_t ns)
{
	struct minute *m = minute_now(s, now_ms);

	if (!m)
		return;
	m->bytes[written] += bytes;
	m->ns[written] += ns;
}

void storage_speed_space(struct storage_speed **s, int64_t now_ms, uint64_t free_bytes)
{
	struct minute *m = minute_now(s, now_ms);

	if (!m)
		return;
	m->free_bytes = free_bytes;
	m->has_free = true;
}

/* The minute `ago` minutes before now; NULL: nothing is known of it. */
static const struct minute *minute_ago(const struct storage_speed *s, int64_t now_ms, int64_t ago)
{
	int64_t number = now_ms / MINUTE_MS - ago;
	const struct minute *m = s && number >= 0 ? &s->minutes[number % STORAGE_SPEED_MINUTES] : NULL;

	return m && m->number == number ? m : NULL;
}

FALLIBLE enum err storage_speed_put(const struct storage_speed *s, int64_t now_ms, int64_t wall_ms, struct buf *out)
{
	static const char *const directions[] = { "read", "write" };
	char stamp[CLOCK_TEXT_MAX];
	bool any = false;

	buf_putc(out, '[');
	for (int64_t ago = STORAGE_SPEED_MINUTES - 1; ago >= 0; ago--) {
		const struct minute *m = minute_ago(s, now_ms, ago);
		if (!m || (!m->bytes[0] && !m->bytes[1]))
			continue;
		buf_printf(out, "%s{\"at\":\"%s\"", any ? "," : "", clock_text(wall_ms - (now_ms - m->number * MINUTE_MS), stamp));
		for (int w = 0; w < 2; w++)
			if (m->bytes[w])
				buf_printf(out, ",\"%s\":{\"bytes\":%ju,\"seconds\":%.6f}", directions[w], (uintmax_t)m->bytes[w],
					   (double)m->ns[w] / 1e9);
		buf_putc(out, '}');
		any = true;
	}
	buf_putc(out, ']');
	return buf_status(out);
}

bool storage_speed_growth(const struct storage_speed *s, int64_t now_ms, int64_t *bytes, int64_t *ms)
{
	const struct minute *first = NULL, *last = NULL;

	for (int64_t ago = STORAGE_SPEED_MINUTES - 1; ago >= 0; ago--) {
		const struct minute *m = minute_ago(s, now_ms, ago);
		if (!m || !m->has_free)
			continue;
		first = first ? first : m;
		last = m;
	}
	if (!first || last->number - first->number < GROWTH_MINUTES_MIN)
		return false;
	*bytes = (int64_t)(first->free_bytes - last->free_bytes);
	*ms = (last->number - first->number) * MINUTE_MS;
	return true;
}
