/* pickle_watch.c: what would loading a pickle run? The machine that executes nothing follows the stream, memo and stack and all, so that
 * a name that is put together in a roundabout way is the name that Python would find. Where it cannot follow, the rest of the stream is
 * searched opcode by opcode.
 *
 * Harmless is only what is known by name. A list of what is dangerous has no end: everything that can be imported may run something. */
#include <stdio.h>

#include "base/mem.h"
#include "format/pickle_impl.h"
#include "tensor/dtype.h"

/* By module: names divided by blanks, * at an end for any rest. PyTorch's own list of what weights_only may load, what its distributed
 * checkpoints hold besides, and the data types of Python and NumPy. */
static const struct {
	const char *modules, *names;
} data[] = {
	{ "builtins __builtin__",
	  "set frozenset complex bytes bytearray object list dict tuple int float bool str slice range long unicode xrange" },
	{ "_codecs", "encode" },
	{ "copyreg copy_reg", "_reconstructor" },
	{ "collections", "OrderedDict Counter deque defaultdict" },
	{ "datetime", "datetime date time timedelta timezone" },
	{ "decimal", "Decimal" },
	{ "fractions", "Fraction" },
	{ "uuid", "UUID" },
	{ "pathlib pathlib._local", "PosixPath PurePosixPath Path PurePath WindowsPath PureWindowsPath" },
	{ "argparse", "Namespace" },
	{ "types", "SimpleNamespace" },
	{ "numpy", "ndarray dtype bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128" },
	{ "numpy.core.multiarray numpy._core.multiarray", "_reconstruct scalar" },
	{ "numpy.core.numeric numpy._core.numeric", "_frombuffer" },
	{ "numpy.dtypes", "*DType" },
	{ "torch", "Size Tensor device *Storage *Tensor qint8 qint32 quint8 quint4x2 quint2x4 bits8 bits16 bits1x8 bits2x4 bits4x2 "
		   "int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7 strided per_tensor_affine "
		   "per_tensor_symmetric per_channel_affine per_channel_affine_float_qparams per_channel_symmetric" },
	{ "torch.cuda", "*Storage *Tensor" },
	{ "torch.sparse torch.cuda.sparse", "*Tensor" },
	{ "torch.storage", "TypedStorage UntypedStorage" },
	{ "torch.nn.parameter", "Parameter Buffer" },
	{ "torch._tensor", "_rebuild_from_type_v2" },
	{ "torch._utils", "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_parameter_with_state "
			  "_rebuild_qtensor _rebuild_sparse_tensor _rebuild_meta_tensor_no_storage _rebuild_wrapper_subclass "
			  "_rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor" },
	{ "torch.serialization", "_get_layout" },
	{ "torch.distributed.checkpoint.metadata torch.distributed._shard.checkpoint.metadata",
	  "ChunkStorageMetadata MetadataIndex TensorStorageMetadata BytesStorageMetadata Metadata TensorProperties StorageMeta "
	  "_MEM_FORMAT_ENCODING MEM_FORMAT_ENCODING" },
	{ "torch.distributed.checkpoint.filesystem torch.distributed._shard.checkpoint.filesystem", "_StorageInfo _StoragePrefix" },
	{ "torch.distributed._shard.sharded_tensor.api torch.distributed._shard.sharded_tensor", "ShardedTensor" },
	{ "torch.distributed._shard.sharded_tensor.metadata", "ShardedTensorMetadata TensorProperties MEM_FORMAT_ENCODING" },
	{ "torch.distributed._shard.sharded_tensor.shard", "Shard" },
	{ "torch.distributed._shard.metadata", "ShardMetadata" },
	{ "torch.distributed._shard.sharding_spec.api torch.distributed._shard.sharding_spec", "EnumerableShardingSpec" },
	{ "torch.distributed._shard.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec" },
	{ "torch.distributed.remote_device", "_remote_device" },
	{ "torch.distributed.tensor torch.distributed._tensor torch.distributed._tensor.api torch.distributed.tensor._api", "DTensor" },
	{ "torch.distributed.tensor._dtensor_spec torch.distributed._tensor.placement_types", "DTensorSpec TensorMeta ShardOrderEntry" },
	{ "torch.distributed.tensor.placement_types torch.distributed._tensor.placement_types",
	  "Shard Replicate Partial _Partial _StridedShard" },
	{ "torch._C._distributed torch.distributed._C", "Shard Replicate Partial _StridedShard Placement" },
	{ "torch.distributed.device_mesh torch.distributed._tensor.device_mesh", "DeviceMesh _MeshLayout" },
};

/* Is the word among those of a list divided by blanks? */
static bool listed(const char *list, struct str word)
{
	while (*list) {
		struct str one = { list, strcspn(list, " ") };
		if (str_glob(one, word))
			return true;
		list += one.n + (list[one.n] == ' ');
	}
	return false;
}

bool pickle_is_data(struct str module, struct str name)
{
	enum dtype dtype;

	if (memchr(name.n ? name.p : "", '.', name.n)) /* STACK_GLOBAL takes attributes of attributes */
		return false;
	for (size_t i = 0; i < sizeof data / sizeof *data; i++)
		if (listed(data[i].modules, module) && listed(data[i].names, name))
			return true;
	if (!str_is(module, "torch") || str_starts(name, "torch."))
		return false;
	bool is_dtype = dtype_parse(name, &dtype) == OK;
	if (!is_dtype)
		err_clear();
	return is_dtype;
}

/* ------------------------------------------------------------------------------------------- what the machine tells */

static FALLIBLE enum err tell(struct pickle *pk, enum pickle_deed deed, struct str module, struct str name)
{
	return pk->watch->deed(pk->watch->user, deed, module, name, pk->op_at);
}

enum err watch_global(struct pickle *pk, pnode global)
{
	if (call_known_of(pk, global) == KNOWN_GETATTR) /* what it is for will be seen */
		return OK;
	return tell(pk, PICKLE_IMPORT, pickle_module(pk, global), pickle_name(pk, global));
}

enum err watch_held(struct pickle *pk, uint32_t from)
{
	for (uint32_t i = from; i < pk->stack.count; i++)
		if (call_known_of(pk, pk->stack.p[i]) == KNOWN_GETATTR)
			TRY(tell(pk, PICKLE_IMPORT, STR("builtins"), STR("getattr")));
	return OK;
}

/* Python 3.11 pickles a member of an enum so: getattr(class, name). PyTorch's metadata have one. */
static bool is_enum_member(const struct pickle *pk, pnode args)
{
	pnode class = pickle_at(pk, args, 0), name = pickle_at(pk, args, 1);

	return pickle_kind(pk, args) == PK_TUPLE && pickle_count(pk, args) == 2 && pickle_kind(pk, class) == PK_GLOBAL &&
	       pickle_is_data(pickle_module(pk, class), pickle_name(pk, class)) &&
	       str_glob(STR("*MEM_FORMAT_ENCODING"), pickle_name(pk, class)) && !str_starts(pickle_str(pk, name), "_");
}

enum err watch_call(struct pickle *pk, pnode callee, pnode args)
{
	if (call_known_of(pk, callee) == KNOWN_GETATTR && is_enum_member(pk, args))
		return OK;
	if (pickle_kind(pk, callee) != PK_GLOBAL)
		return tell(pk, PICKLE_CALL, STR(""), STR(""));
	return tell(pk, PICKLE_CALL, pickle_module(pk, callee), pickle_name(pk, callee));
}

enum err watch_change(struct pickle *pk, pnode global)
{
	return tell(pk, PICKLE_CHANGE, pickle_module(pk, global), pickle_name(pk, global));
}

enum err watch_extension(struct pickle *pk, uint64_t number)
{
	char name[32];

	snprintf(name, sizeof name, "extension %ju", (uintmax_t)number);
	return tell(pk, PICKLE_IMPORT, STR("copyreg"), str_of(name));
}

enum err watch_bytes(struct pickle *pk, const struct pickle_op *op)
{
	if (!pk->watch->bytes)
		return OK;
	return pk->watch->bytes(pk->watch->user, op->data, op->len, (uint64_t)(op->data - pk->in.p));
}

/* ------------------------------------------------------------------------------------------------------- inspect */

static struct str op_str(const unsigned char *p, uint64_t n)
{
	struct str s = { (const char *)p, n };

	return pickle_utf8(s) ? s : STR("?");
}

/* Goes on behind what the machine could not follow: globals that are spelled out, and those whose names are the last two strings. */
static FALLIBLE enum err look_through(struct pickle *pk)
{
	struct str last[2] = { STR(""), STR("") };
	struct pickle_op op = { 0 };

	while (op.code != '.' && pickle_op_next(pk, &op) == OK) {
		switch (op.code) {
		case 'X':
		case 0x8c:
		case 0x8d:
			last[0] = last[1];
			last[1] = op_str(op.data, op.len);
			break;
		case 'c':
		case 'i': TRY(tell(pk, PICKLE_IMPORT, op_str(op.data, op.len), op_str(op.data2, op.len2))); break;
		case 0x93: TRY(tell(pk, PICKLE_IMPORT, last[0], last[1])); break;
		case 0x82:
		case 0x83:
		case 0x84: TRY(watch_extension(pk, op.number)); break;
		default: break;
		}
	}
	err_clear();
	return OK;
}

enum err pickle_inspect(const void *bytes, uint64_t n, const struct pickle_watch *watch, uint64_t *consumed_out)
{
	struct pickle *pk CLEANUP(pickle_free_ptr) = mem_zalloc(1, sizeof *pk);

	NEED(pk, "no memory for a pickle");
	pk->watch = watch;
	TRY(pickle_begin(pk, bytes, n));
	enum err e = pickle_run(pk);
	if (e == ERR_FORMAT_PICKLE) {
		CLEANUP(err_restore) struct err_info why = *err_last();
		TRY(look_through(pk));
	}
	*consumed_out = pk->in.at;
	return e;
}
