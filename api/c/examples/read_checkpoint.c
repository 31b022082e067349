/* read_checkpoint.c: lists what a PyTorch Distributed Checkpoint holds, and reads a slice of a tensor, with digests checked.
 *
 *     read_checkpoint DIR                              tensors (dtype, shape, chunks) and values
 *     read_checkpoint DIR FQN OFFSETS SIZES FILE       the box as raw bytes, e.g.  ckpt model.w 2,0 3,9 w.bin
 *     read_checkpoint DIR FQN FILE                     the whole tensor
 *
 *     cc -o read_checkpoint read_checkpoint.c $(pkg-config --cflags --libs dcp)
 * and, without libdcp.so:
 *     cc -o read_checkpoint read_checkpoint.c $(pkg-config --cflags --libs --static dcp | sed 's/-ldcp/-l:libdcp.a/') */
#include <dcp.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { DIMS_MAX = 64 };

/* Prints what is known of the error; returns the program's exit status. */
static int fail(const char *what)
{
	fprintf(stderr, "%s: %s: %s", what, dcp_error_code(), dcp_error_message());
	if (dcp_error_file()[0])
		fprintf(stderr, " (file %s, offset %" PRId64 ")", dcp_error_file(), dcp_error_offset());
	if (dcp_error_fqn()[0])
		fprintf(stderr, " (%s)", dcp_error_fqn());
	fputc('\n', stderr);
	return 1;
}

static void print_tensor(const dcp_tensor *t)
{
	printf("%s %s [", dcp_tensor_fqn(t), dcp_tensor_dtype(t));
	for (uint32_t d = 0; d < dcp_tensor_ndim(t); d++)
		printf("%s%" PRId64, d ? ", " : "", dcp_tensor_shape(t)[d]);
	printf("] %" PRIu64 " bytes in %zu chunks\n", dcp_tensor_bytes(t), dcp_tensor_chunk_count(t));
}

static int print_value(dcp_checkpoint *ckpt, const dcp_value *v)
{
	dcp_value_kind kind;
	size_t n;
	char *text;

	if (dcp_value_read(ckpt, v, &kind, &text, &n) != DCP_OK)
		return fail(dcp_value_fqn(v));
	if (kind == DCP_JSON)
		printf("%s = %s\n", dcp_value_fqn(v), text);
	else if (kind == DCP_BYTES)
		printf("%s = %zu bytes\n", dcp_value_fqn(v), n);
	else
		printf("%s is a %s\n", dcp_value_fqn(v), text);
	free(text);
	return 0;
}

static int list(dcp_checkpoint *ckpt)
{
	for (size_t i = 0; i < dcp_tensor_count(ckpt); i++)
		print_tensor(dcp_tensor_at(ckpt, i));
	for (size_t i = 0; i < dcp_value_count(ckpt); i++)
		if (print_value(ckpt, dcp_value_at(ckpt, i)) != 0)
			return 1;
	return 0;
}

/* "2,0" as ndim numbers; 0: it is not that. */
static int parse_dims(const char *text, uint32_t ndim, int64_t *out)
{
	char *end;

	for (uint32_t d = 0; d < ndim; d++, text = end + (*end == ',')) {
		out[d] = strtoll(text, &end, 10);
		if (end == text || (d + 1 < ndim && *end != ','))
			return 0;
	}
	return *text == '\0';
}

static int write_file(const char *path, const void *bytes, size_t n)
{
	FILE *f = fopen(path, "wb");
	int ok = f && fwrite(bytes, 1, n, f) == n;

	if (f && fclose(f) != 0)
		ok = 0;
	if (!ok)
		perror(path);
	return ok ? 0 : 1;
}

static int read_box(dcp_checkpoint *ckpt, const dcp_tensor *t, const int64_t *offsets, const int64_t *sizes, const char *path)
{
	uint64_t bytes = dcp_tensor_element_bytes(t), unverified = 0;

	for (uint32_t d = 0; d < dcp_tensor_ndim(t); d++)
		bytes *= sizes[d] > 0 ? (uint64_t)sizes[d] : 0;
	void *buffer = bytes <= dcp_tensor_bytes(t) ? malloc(bytes + 1) : NULL;
	if (!buffer) {
		fprintf(stderr, "no memory for %" PRIu64 " bytes\n", bytes);
		return 1;
	}
	int status = dcp_read_slice(ckpt, t, offsets, sizes, buffer, bytes, 0, &unverified) == DCP_OK ? write_file(path, buffer, bytes)
											       : fail(dcp_tensor_fqn(t));
	free(buffer);
	if (status == 0)
		printf("%" PRIu64 " bytes, %" PRIu64 " of what was read unverified\n", bytes, unverified);
	return status;
}

static int read_tensor(dcp_checkpoint *ckpt, int argc, char **argv)
{
	const dcp_tensor *t = dcp_tensor_find(ckpt, argv[2]);
	int64_t offsets[DIMS_MAX] = { 0 }, sizes[DIMS_MAX];

	if (!t || dcp_tensor_ndim(t) > DIMS_MAX) {
		fprintf(stderr, "there is no tensor '%s'\n", argv[2]);
		return 1;
	}
	uint32_t n = dcp_tensor_ndim(t);
	for (uint32_t d = 0; d < n; d++)
		sizes[d] = dcp_tensor_shape(t)[d];
	if (argc == 6 && (!parse_dims(argv[3], n, offsets) || !parse_dims(argv[4], n, sizes))) {
		fprintf(stderr, "OFFSETS and SIZES are %u numbers each, divided by commas\n", n);
		return 2;
	}
	return read_box(ckpt, t, offsets, sizes, argv[argc - 1]);
}

int main(int argc, char **argv)
{
	dcp_checkpoint *ckpt;

	if (argc != 2 && argc != 4 && argc != 6) {
		fprintf(stderr, "usage: %s DIR [FQN [OFFSETS SIZES] FILE]\n", argv[0]);
		return 2;
	}
	if (dcp_open(argv[1], &ckpt) != DCP_OK)
		return fail(argv[1]);
	int status = argc == 2 ? list(ckpt) : read_tensor(ckpt, argc, argv);
	if (status == 0 && dcp_unverified_bytes(ckpt))
		printf("%" PRIu64 " bytes had neither digest nor CRC32\n", dcp_unverified_bytes(ckpt));
	dcp_close(ckpt);
	return status;
}
