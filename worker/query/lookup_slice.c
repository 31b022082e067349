/* lookup_slice.c: a box of one tensor (part_read.h) as raw bytes, .npy or safetensors, in a memfd. With "verify":false only what the slice
 * needs is read. */
#include <sys/mman.h>
#include <unistd.h>

#include "base/num.h"
#include "format/npy.h"
#include "format/safetensors.h"
#include "os/fs.h"
#include "query/lookup.h"
#include "query/lookup_cache.h"
#include "runner/part_read.h"
#include "store/identity.h"

enum { SLICE_MAX = 1 << 30 };

struct slice {
	struct worker *w;
	struct checkpoint *source;
	const struct sd_tensor *tensor;
	int64_t dims[2 * NDIM_MAX];
	bool drop[NDIM_MAX];           /* dims given by one index vanish */
	struct buf head;
	uint64_t bytes;
	bool verify;
	struct checked checked;
	int fd;
};

/* ------------------------------------------------------------------------------------------------------- parsing */

static bool take_int(struct str *s, int64_t *out)
{
	bool minus = s->n && s->p[0] == '-';
	size_t i = minus;
	uint64_t v = 0;

	while (i < s->n && s->p[i] >= '0' && s->p[i] <= '9' && i < 20)
		i++;
	if (!str_to_u64((struct str){ s->p + minus, i - minus }, &v) || v > INT64_MAX)
		return false;
	*out = minus ? -(int64_t)v : (int64_t)v;
	*s = (struct str){ s->p + i, s->n - i };
	return true;
}

static int64_t clamp(int64_t v, int64_t size)
{
	v = v < 0 ? v + size : v;
	return v < 0 ? 0 : v > size ? size : v;
}

/* "a:b", ":", "a:", ":b" or "i" */
static FALLIBLE enum err take_dim(struct slice *s, uint32_t d, struct str text)
{
	int64_t size = s->tensor->shape[d], begin = 0, end = size;
	uint32_t n = s->tensor->ndim;
	bool has_begin = take_int(&text, &begin);

	if (has_begin && text.n == 0) {
		if (begin < -size || begin >= size)
			return ERR(RANGE_INVALID, "index %jd in dim %u of %jd", (intmax_t)begin, d, (intmax_t)size);
		s->dims[d] = begin < 0 ? begin + size : begin;
		s->dims[n + d] = 1;
		s->drop[d] = true;
		return OK;
	}
	if (text.n == 0 || text.p[0] != ':')
		return ERR(RANGE_INVALID, "dim %u of the slice is not a:b", d);
	text = (struct str){ text.p + 1, text.n - 1 };
	if (text.n && (!take_int(&text, &end) || text.n))
		return ERR(RANGE_INVALID, "dim %u of the slice is not a:b", d);
	begin = clamp(begin, size);
	end = clamp(end, size);
	s->dims[d] = begin;
	s->dims[n + d] = end > begin ? end - begin : 0;
	return OK;
}

static FALLIBLE enum err parse_slice(struct slice *s, const char *text)
{
	struct str rest = str_of(text ? text : "");
	uint32_t n = s->tensor->ndim;

	for (uint32_t d = 0; d < n; d++)
		s->dims[n + d] = s->tensor->shape[d];
	for (uint32_t d = 0; rest.n; d++) {
		const char *comma = memchr(rest.p, ',', rest.n);
		struct str one = { rest.p, comma ? (size_t)(comma - rest.p) : rest.n };
		if (d >= n)
			return ERR(RANGE_INVALID, "the slice has more dims than the tensor's %u", n);
		TRY(take_dim(s, d, one));
		rest = (struct str){ rest.p + one.n + (comma != NULL), rest.n - one.n - (comma != NULL) };
	}
	return OK;
}

/* -------------------------------------------------------------------------------------------------------- heads */

static uint32_t kept_shape(const struct slice *s, int64_t *shape)
{
	uint32_t m = 0, n = s->tensor->ndim;

	for (uint32_t d = 0; d < n; d++)
		if (!s->drop[d])
			shape[m++] = s->dims[n + d];
	return m;
}

static FALLIBLE enum err put_npy(struct slice *s, const int64_t *shape, uint32_t m)
{
	const char *type = npy_type(s->tensor->dtype);

	if (!type)
		return ERR(NOT_ACCEPTABLE, ".npy has no %s; ask for raw or safetensors", dtype_name(s->tensor->dtype));
	return npy_put_head(&s->head, type, m, shape);
}

static FALLIBLE enum err put_safetensors(struct slice *s, const int64_t *shape, uint32_t m)
{
	struct sft_entry e = { .name = s->tensor->fqn, .dtype = s->tensor->dtype, .ndim = m, .shape = shape, .end = s->bytes };

	if (!dtype_safetensors_name(s->tensor->dtype) || str_is(s->tensor->fqn, "__metadata__"))
		return ERR(NOT_ACCEPTABLE, "safetensors cannot hold this tensor; ask for raw");
	return sft_put_header(&s->head, &e, 1, NULL, 0, 8);
}

/* ------------------------------------------------------------------------------------------------------- reading */

static FALLIBLE enum err fill(struct slice *s)
{
	struct part_box box = { .checkpoint = s->source, .tensor = s->tensor, .dims = s->dims,
				.verify = s->verify, .at = s->head.len };

	s->fd = memfd_create("dcpd-slice", MFD_CLOEXEC);
	if (s->fd < 0 || ftruncate(s->fd, (off_t)(s->head.len + s->bytes)) < 0)
		return ERR_SYS(NO_MEMORY, "no memory for a slice of %ju bytes", (uintmax_t)s->bytes);
	TRY(fs_pwrite(s->fd, s->head.p, s->head.len, 0, "slice"));
	box.fd = s->fd;
	return part_read_box(s->w, &box, &s->checked);
}

/* The content of the checkpoint that the slice is of; "": it is not known. */
static void look_at_identity(const struct slice *s, char out[IDENTITY_MAX])
{
	if (identity_of(store_top(s->source->store), s->source->name, out)) {
		out[0] = '\0';
		err_clear();
	}
}

static FALLIBLE enum err slice(struct slice *s, const json_t *q, struct buf *out)
{
	char before[IDENTITY_MAX], after[IDENTITY_MAX];
	const json_t *fqn = json_object_get(q, "fqn");
	const char *format = json_string_value(json_object_get(q, "format"));
	int64_t shape[NDIM_MAX];
	uint64_t numel;

	TRY(lookup_checkpoint(s->w, q, &s->source));
	TRY(checkpoint_check_whole(s->source));
	checkpoint_note(s->source, false, &s->checked);
	s->tensor = sdict_tensor(s->source->sd, (struct str){ json_string_value(fqn), json_string_length(fqn) });
	if (!s->tensor)
		return ERR(MISSING_KEY, "there is no tensor '%s'", json_string_value(fqn)); /* NOT_FOUND: no checkpoint */
	TRY(parse_slice(s, json_string_value(json_object_get(q, "slice"))));
	TRY(box_numel(s->tensor->ndim, s->dims + s->tensor->ndim, &numel));
	TRY(num_mul(numel, dtype_bytes(s->tensor->dtype), &s->bytes));
	if (s->bytes > SLICE_MAX)
		return ERR(PAYLOAD_TOO_LARGE, "a slice of %ju bytes; at most %d at once", (uintmax_t)s->bytes, SLICE_MAX);
	uint32_t m = kept_shape(s, shape);
	bool npy = format && strcmp(format, "npy") == 0, sft = format && strcmp(format, "safetensors") == 0;
	if (npy)
		TRY(put_npy(s, shape, m));
	if (sft)
		TRY(put_safetensors(s, shape, m));
	TRY(lookup_room(q, s->head.len + s->bytes));
	look_at_identity(s, before);
	TRY(fill(s));
	look_at_identity(s, after);
	buf_printf(out, "{\"bytes\":%ju,\"dtype\":\"%s\",\"shape\":[", (uintmax_t)(s->head.len + s->bytes),
		   dtype_name(s->tensor->dtype));
	for (uint32_t i = 0; i < m; i++)
		buf_printf(out, "%s%jd", i ? "," : "", (intmax_t)shape[i]);
	buf_printf(out, "],\"unverified_bytes\":%ju,\"etag\":\"%s\",\"content_type\":\"%s\"}",
		   (uintmax_t)s->checked.unverified_bytes, strcmp(before, after) == 0 ? after : "",
		   npy ? "application/x-npy" : sft ? "application/x-safetensors" : "application/octet-stream");
	return OK;
}

enum err lookup_slice(struct worker *w, const json_t *q, const int *, uint32_t, struct buf *out, int *fd_out)
{
	struct slice s = { .w = w, .fd = -1, .head = BUF_INIT(1 << 20), .verify = !json_is_false(json_object_get(q, "verify")) };

	enum err e = slice(&s, q, out);
	if (!e) {
		*fd_out = s.fd;
		s.fd = -1;
	}
	fs_drop(&s.fd);
	buf_free(&s.head);
	checked_free(&s.checked);
	checkpoint_free(s.source);
	return e;
}
