/* torch_item_read.c: what tensor is in an item. data.pkl is a graph of "would-be calls" (pickle.h); the tensor is found by
 * recognising PyTorch's rebuild functions, never by calling anything. Only dense tensors are described: what DCP can slice. */
#include "format/torch_item_graph.h"

#include <stdio.h>

#include "base/num.h"
#include "base/reader.h"

/* Parameters and subclasses wrap the tensor that they hold. A few levels are enough for what PyTorch makes. */
enum { WRAPS_MAX = 4 };

static FALLIBLE enum err not_dense(const struct pickle *pk, pnode n)
{
	char name[128];

	return ERR(FORMAT_ITEM, "the item holds a %s, not a dense tensor", pickle_class_name(pk, n, name, sizeof name));
}

bool item_is_tensor(const struct pickle *pk, pnode n)
{
	struct str module = pickle_module(pk, n);

	return pickle_kind(pk, n) == PK_OBJECT && str_starts(pickle_name(pk, n), "_rebuild_") &&
	       (str_is(module, "torch._utils") || str_is(module, "torch._tensor"));
}

/* torch._utils._rebuild_parameter(data, …) → data; torch._tensor._rebuild_from_type_v2(func, type, args, state) → func(*args) */
static FALLIBLE enum err unwrap(const struct pickle *pk, pnode n, pnode *func_args, struct str *func, bool *requires_grad)
{
	for (int i = 0; i < WRAPS_MAX; i++) {
		pnode args = pickle_args(pk, n), callee;
		if (pickle_is_call(pk, n, "torch._utils", "_rebuild_parameter") ||
		    pickle_is_call(pk, n, "torch._utils", "_rebuild_parameter_with_state")) {
			*requires_grad = pickle_is_true(pk, pickle_at(pk, args, 1));
			n = pickle_at(pk, args, 0);
			continue;
		}
		if (pickle_is_call(pk, n, "torch._tensor", "_rebuild_from_type_v2")) {
			callee = pickle_at(pk, args, 0);
			if (pickle_kind(pk, callee) != PK_GLOBAL || !str_is(pickle_module(pk, callee), "torch._utils"))
				return not_dense(pk, n);
			*func = pickle_name(pk, callee);
			*func_args = pickle_at(pk, args, 2);
			if (str_is(*func, "_rebuild_parameter")) {
				*requires_grad = pickle_is_true(pk, pickle_at(pk, *func_args, 1));
				n = pickle_at(pk, *func_args, 0);
				continue;
			}
			return OK;
		}
		if (pickle_kind(pk, n) != PK_OBJECT || !str_is(pickle_module(pk, n), "torch._utils"))
			return not_dense(pk, n);
		*func = pickle_name(pk, n);
		*func_args = args;
		return OK;
	}
	return ERR(FORMAT_ITEM, "a tensor wrapped too often");
}

static bool is_quantised(struct str class, enum dtype *out)
{
	static const struct {
		const char *class;
		enum dtype of;
	} all[] = { { "QInt8Storage", DT_INT8 }, { "QUInt8Storage", DT_UINT8 }, { "QInt32Storage", DT_INT32 },
		    { "QUInt4x2Storage", DT_UINT8 }, { "QUInt2x4Storage", DT_UINT8 } };

	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		if (str_is(class, all[i].class)) {
			*out = all[i].of;
			return true;
		}
	return false;
}

enum err item_storage_of(const struct pickle *pk, pnode n, bool quantised, struct item_storage *s)
{
	pnode id = pickle_args(pk, n), cls = pickle_at(pk, id, 1), view = pickle_at(pk, id, 5);
	struct str name = pickle_name(pk, cls), module = pickle_module(pk, cls);
	int64_t count;

	if (pickle_kind(pk, n) != PK_PERSID || !str_is(pickle_str(pk, pickle_at(pk, id, 0)), "storage") ||
	    pickle_kind(pk, cls) != PK_GLOBAL)
		return ERR(FORMAT_ITEM, "the tensor refers to no storage");
	if (!str_is(module, "torch") && !str_is(module, "torch.storage") && !str_is(module, "torch.cuda"))
		return ERR(FORMAT_ITEM, "storage class %.*s.%.*s is not known", (int)num_min(module.n, 64), module.p,
			   (int)num_min(name.n, 64), name.p);
	s->dtype = DT_UINT8;
	if (!str_is(name, "UntypedStorage") && !(quantised && is_quantised(name, &s->dtype)))
		TRY(dtype_from_storage_class(name, &s->dtype));
	s->key = pickle_str(pk, pickle_at(pk, id, 2));
	if (s->key.n == 0 || !pickle_int(pk, pickle_at(pk, id, 4), &count) || count < 0)
		return ERR(FORMAT_ITEM, "the tensor's storage has no key or size");
	if (view && pickle_kind(pk, view) != PK_NONE)
		return ERR(FORMAT_ITEM, "a view of another storage (torch before 0.4) is not supported");
	return num_mul((uint64_t)count, dtype_bytes(s->dtype), &s->bytes);
}

static FALLIBLE enum err read_dims(const struct pickle *pk, pnode n, const char *what, uint32_t *ndim, int64_t *into)
{
	uint64_t count = pickle_count(pk, n);

	if (pickle_kind(pk, n) != PK_TUPLE && pickle_kind(pk, n) != PK_SIZE)
		return ERR(FORMAT_ITEM, "the tensor's %s is no tuple", what);
	if (count > NDIM_MAX)
		return ERR(LIMIT_EXCEEDED, "a tensor of %ju dims", (uintmax_t)count);
	for (uint32_t d = 0; d < count; d++)
		if (!pickle_int(pk, pickle_at(pk, n, d), &into[d]) || into[d] < 0)
			return ERR(FORMAT_ITEM, "the tensor's %s in dim %u is no number >= 0", what, d);
	*ndim = (uint32_t)count;
	return OK;
}

/* The highest element that can be addressed must lie inside the storage. */
static FALLIBLE enum err check_reach(const struct item_tensor *t)
{
	uint64_t numel, last = t->storage_offset, step, bytes;

	TRY(box_numel(t->ndim, t->sizes, &numel));
	TRY(num_mul(numel, dtype_bytes(t->dtype), &bytes));
	if (numel == 0)
		return OK;
	for (uint32_t d = 0; d < t->ndim; d++) {
		TRY(num_mul((uint64_t)t->sizes[d] - 1, (uint64_t)t->strides[d], &step));
		TRY(num_add(last, step, &last));
	}
	TRY(num_add(last, 1, &last));
	TRY(num_mul(last, dtype_bytes(t->dtype), &bytes));
	if (bytes > t->payload_bytes)
		return ERR(FORMAT_ITEM, "the tensor needs %ju bytes, its storage has %ju", (uintmax_t)bytes,
			   (uintmax_t)t->payload_bytes);
	return OK;
}

static bool is_c_order(const struct item_tensor *t)
{
	int64_t run = 1;

	if (box_empty(t->ndim, t->sizes))
		return true;
	for (uint32_t d = t->ndim; d-- > 0;) {
		if (t->sizes[d] != 1 && t->strides[d] != run)
			return false;
		run *= t->sizes[d]; /* cannot overflow: check_reach saw the product */
	}
	return true;
}

/* {'conj': True}: the lazy bits. What else may be said there does not change the bytes. */
static FALLIBLE enum err read_bits(const struct pickle *pk, pnode dict, struct item_tensor *t)
{
	if (!dict || pickle_kind(pk, dict) == PK_NONE)
		return OK;
	if (pickle_kind(pk, dict) != PK_DICT)
		return ERR(FORMAT_ITEM, "the tensor's flags are no dict");
	t->conj = pickle_is_true(pk, pickle_dict_get(pk, dict, "conj"));
	t->neg = pickle_is_true(pk, pickle_dict_get(pk, dict, "neg"));
	if (t->conj && !dtype_is_complex(t->dtype))
		return ERR(FORMAT_ITEM, "a conjugated tensor of dtype %s", dtype_name(t->dtype));
	return OK;
}

/* _rebuild_tensor(storage, offset, size, stride), _v2(…, requires_grad, hooks[, flags]), _v3(…, hooks, dtype[, flags]) */
static FALLIBLE enum err read_call(const struct pickle *pk, struct str func, pnode args, struct item_storage *s,
				   struct item_tensor *t)
{
	bool v3 = str_is(func, "_rebuild_tensor_v3");
	uint32_t strides;
	int64_t offset;

	if (!v3 && !str_is(func, "_rebuild_tensor_v2") && !str_is(func, "_rebuild_tensor"))
		return ERR(FORMAT_UNSUPPORTED, "torch._utils.%.*s makes the tensor: only dense tensors are read, not sparse, quantized "
			   "or nested ones", (int)num_min(func.n, 80), func.p);
	TRY(item_storage_of(pk, pickle_at(pk, args, 0), false, s));
	t->dtype = s->dtype;
	if (v3) {
		pnode dtype = pickle_at(pk, args, 6);
		if (pickle_kind(pk, dtype) != PK_GLOBAL || !str_is(pickle_module(pk, dtype), "torch"))
			return ERR(FORMAT_ITEM, "the tensor has no dtype");
		TRY(dtype_parse(pickle_name(pk, dtype), &t->dtype));
	}
	if (!pickle_int(pk, pickle_at(pk, args, 1), &offset) || offset < 0)
		return ERR(FORMAT_ITEM, "the tensor's storage offset is no number >= 0");
	t->storage_offset = (uint64_t)offset;
	TRY(read_dims(pk, pickle_at(pk, args, 2), "size", &t->ndim, t->sizes));
	TRY(read_dims(pk, pickle_at(pk, args, 3), "stride", &strides, t->strides));
	if (strides != t->ndim)
		return ERR(FORMAT_ITEM, "the tensor has %u sizes and %u strides", t->ndim, strides);
	return read_bits(pk, pickle_at(pk, args, v3 ? 7 : 6), t);
}

enum err item_take_record(const struct zip *z, const struct zip_record *r, const struct item_storage *s, struct item_tensor *t)
{
	if (r->bytes != s->bytes)
		return ERR(FORMAT_ITEM, "record '%.*s' has %ju bytes, the tensor's storage %ju", (int)num_min(r->name.n, 80), r->name.p,
			   (uintmax_t)r->bytes, (uintmax_t)s->bytes);
	TRY(zip_locate(z, r, &t->payload_off));
	t->stored_bytes = r->packed_bytes;
	t->deflated = r->deflated;
	t->crc32 = r->crc32;
	t->crc_known = r->crc32 != 0 || r->bytes == 0;
	return OK;
}

static FALLIBLE enum err find_record(const struct item *it, const struct item_storage *s, struct item_tensor *t)
{
	char name[80];
	const struct zip_record *r;

	if (s->key.n > 64 || memchr(s->key.p, 0, s->key.n))
		return ERR(FORMAT_ITEM, "a storage key of %zu bytes", s->key.n);
	snprintf(name, sizeof name, "data/%.*s", (int)s->key.n, s->key.p);
	TRY(zip_find(it->zip, str_of(name), &r));
	if (!r)
		return ERR(FORMAT_ITEM, "the archive has no record '%s'", name);
	return item_take_record(it->zip, r, s, t);
}

/* A stream: the list of keys must name this storage alone; then its count and bytes follow. */
static FALLIBLE enum err find_in_stream(const struct item_source *src, const struct item *it, const struct item_storage *s,
					struct item_tensor *t)
{
	struct pickle *keys CLEANUP(pickle_free_ptr) = NULL;
	unsigned char count[8];
	uint64_t n, off;
	pnode key = 0;

	TRY(pickle_parse(it->pickle.p + it->data_off, it->pickle.len - it->data_off, NULL, &keys));
	struct pickle_iter i = pickle_iter(keys, pickle_root(keys));
	if (pickle_kind(keys, pickle_root(keys)) != PK_LIST || pickle_count(keys, pickle_root(keys)) != 1 ||
	    !pickle_next(keys, &i, &key) || !str_eq(pickle_str(keys, key), s->key))
		return ERR(FORMAT_ITEM, "the stream holds other storages than the tensor's");
	off = it->data_off + pickle_consumed(keys);
	TRY(source_read(src, off, count, sizeof count));
	struct reader r = reader_of(count, sizeof count);
	TRY(num_mul(reader_u64(&r), dtype_bytes(s->dtype), &n));
	if (n != s->bytes)
		return ERR(FORMAT_ITEM, "the stream has %ju bytes, the tensor's storage %ju", (uintmax_t)n,
			   (uintmax_t)s->bytes);
	t->payload_off = off + sizeof count;
	t->stored_bytes = n;
	if (!num_inside(t->payload_off, n, src->length))
		return ERR(FORMAT_ITEM, "the stream ends inside the storage of %ju bytes", (uintmax_t)n);
	return OK;
}

enum err item_tensor_of(const struct pickle *pk, pnode n, struct item_tensor *out, struct item_storage *storage_out)
{
	struct item_tensor t = { 0 };
	struct str func = { 0 };
	bool requires_grad = false;
	pnode args = 0;

	TRY(unwrap(pk, n, &args, &func, &requires_grad));
	TRY(read_call(pk, func, args, storage_out, &t));
	t.requires_grad = requires_grad || pickle_is_true(pk, pickle_at(pk, args, 4));
	t.payload_bytes = storage_out->bytes;
	TRY(check_reach(&t));
	t.c_order = is_c_order(&t);
	*out = t;
	return OK;
}

enum err item_read_tensor(const struct item_source *src, struct item_tensor *out)
{
	CLEANUP(item_close) struct item it = { .pickle = BUF_INIT(0) };
	struct item_storage s;
	struct item_tensor t;

	TRY(item_open(src, ITEM_TENSOR_PICKLE_MAX, &it));
	TRY(item_tensor_of(it.pk, pickle_root(it.pk), &t, &s));
	t.big_endian = it.big_endian;
	TRY(it.zip ? find_record(&it, &s, &t) : find_in_stream(src, &it, &s, &t));
	*out = t;
	return OK;
}
