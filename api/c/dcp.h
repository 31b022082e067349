/* dcp.h: reads PyTorch Distributed Checkpoints (DCP) from C and C++, without PyTorch, Python or a daemon.
 *
 *     dcp_checkpoint *ckpt;
 *     if (dcp_open("/data/ckpt/run1/step-100", &ckpt) != DCP_OK) {
 *             fprintf(stderr, "%s: %s\n", dcp_error_code(), dcp_error_message());
 *             return 1;
 *     }
 *     const dcp_tensor *w = dcp_tensor_find(ckpt, "model.w");
 *     void *bytes = w ? malloc(dcp_tensor_bytes(w)) : NULL;
 *     if (bytes && dcp_read(ckpt, w, bytes, dcp_tensor_bytes(w), 0, NULL) == DCP_OK)
 *             … the whole tensor, in C order, whatever ranks wrote it …
 *     dcp_close(ckpt);
 *
 * Build:   cc main.c $(pkg-config --cflags --libs dcp)                                                  with the shared library
 *          cc main.c $(pkg-config --cflags --libs --static dcp | sed 's/-ldcp/-l:libdcp.a/')            with the static one
 *
 * What is read. Checkpoints that torch.distributed.checkpoint (2.2 and later) or dcpd wrote: a directory with `.metadata`, or with
 * `__{rank}.metadata` of each rank; safetensors are DCP_UNSUPPORTED. Names, shapes and dtypes are PyTorch's. Tensors are
 * logical ones: shards of all ranks together.
 *
 * Trust. By default every byte that a function returns was compared with a digest of dcpd's manifest or with a CRC32 of the file; a
 * byte that differs is DCP_DAMAGED, with file and offset. Bytes that have neither (PyTorch's `.metadata` always) are returned, counted
 * and named: see dcp_unverified_bytes. A checkpoint is input from outside: nothing in it is executed, no link in it is followed, no
 * file outside its directory is opened. Memory is about that of the metadata's structure (metadata of more than 1 GiB are refused) and
 * 64 MiB at most for each thread that reads; a host that opens checkpoints of strangers may want a limit of its own (setrlimit)
 * besides.
 *
 * The host process. The library has threads of its own only where io_uring is refused; they block all signals and end with dcp_close.
 * The library installs no signal handler, changes neither umask, limits, locale, working directory nor environment, never calls exit,
 * writes nothing to standard output or error, and does not fork. Checkpoints are never written to; items that a transform compressed
 * are undone in memory, those larger than 32 MiB in a file without a name on the checkpoint's file system. Running out of memory is
 * DCP_NO_MEMORY.
 * A broken promise inside the library itself (not in a checkpoint) ends the process by abort(), with a line on standard error: it is a
 * defect to be reported.
 *
 * Threads. Any number of threads may call any function on one checkpoint at a time, but for dcp_close, which must be the last. The
 * dcp_error_* functions tell of the calling thread's latest failed call. A thread must not be cancelled during a call. After fork() the
 * child must not use what the parent opened.
 *
 * Changes to a checkpoint while it is open: dcp_open holds the directory. If the checkpoint is replaced by rename, reads go on in the
 * old one; if files are removed or written to, a read fails or, if digests are there, finds the difference.
 *
 * Binary interface: symbols are versioned (dcp_0); structs are opaque; functions and codes are only ever added to libdcp.so.0. */
#ifndef DCP_H
#define DCP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define DCP_API __attribute__((visibility("default")))
#else
#define DCP_API
#endif

/* A checkpoint that is open. Owns all tensors, values and strings that its functions return: they are good until dcp_close. */
typedef struct dcp_checkpoint dcp_checkpoint;
typedef struct dcp_tensor dcp_tensor;
typedef struct dcp_value dcp_value;

/* The outcome of a call: a class to branch on. dcp_error_code() is finer. */
typedef enum dcp_status {
	DCP_OK = 0,
	DCP_INVALID = 1,      /* an argument cannot be used: NULL, a box outside the tensor, a buffer that is too small */
	DCP_NOT_FOUND = 2,    /* there is no such directory, file or name */
	DCP_DAMAGED = 3,      /* the checkpoint is incomplete, or not what was written */
	DCP_UNSUPPORTED = 4,  /* a format, dtype or transform that this version does not read */
	DCP_IO = 5,           /* the file system reported an error, or permission is missing */
	DCP_NO_MEMORY = 6,
	DCP_FAILED = 7        /* anything else */
} dcp_status;

/* "0.1.0": the version of the library that runs, not of this header. */
DCP_API const char *dcp_version(void);

/* ------------------------------------------------------------------------------------------------------- errors
 *
 * Of the calling thread's latest call that did not return DCP_OK. Strings are good until the thread's next call of the library and are
 * never NULL; "" and -1 mean that it is not known. */
DCP_API const char *dcp_error_code(void);      /* one word, for programs: "digest_mismatch"; the words of api/errors.md */
DCP_API const char *dcp_error_message(void);   /* one sentence, for people */
DCP_API const char *dcp_error_file(void);      /* relative to the checkpoint's directory */
DCP_API int64_t dcp_error_offset(void);        /* byte in that file */
DCP_API const char *dcp_error_fqn(void);       /* the tensor or value */
DCP_API int64_t dcp_error_rank(void);          /* the rank that wrote it */

/* --------------------------------------------------------------------------------------------------- a checkpoint */

/* Opens the checkpoint in the directory `path`: parses and checks its metadata and manifest, looks at the size of every file. Reads no
 * tensor. *out is set on success only; dcp_close it. DCP_NOT_FOUND, DCP_DAMAGED, DCP_UNSUPPORTED, DCP_IO. */
DCP_API dcp_status dcp_open(const char *path, dcp_checkpoint **out);
/* Frees the checkpoint and all that came from it. NULL is fine. */
DCP_API void dcp_close(dcp_checkpoint *ckpt);

/* 1 + the highest rank that wrote a file. */
DCP_API uint32_t dcp_world_size(const dcp_checkpoint *ckpt);

/* "", or what a reader should know: the manifest is outdated, for PyTorch has saved over what dcpd wrote. */
DCP_API const char *dcp_warning(const dcp_checkpoint *ckpt);

/* Bytes returned so far, by all threads, that there was nothing to compare with (or that were read with DCP_UNVERIFIED). */
DCP_API uint64_t dcp_unverified_bytes(const dcp_checkpoint *ckpt);
/* The i-th range of such bytes, of the first 1,000: returns 0 if there are fewer, else 1 and sets what is not NULL. *fqn is "" for
 * metadata. */
DCP_API int dcp_unverified_at(const dcp_checkpoint *ckpt, size_t i, const char **fqn, const char **file, uint64_t *offset,
			      uint64_t *bytes);

/* Reads and compares everything that is stored, to the end, whatever is wrong. on_damage (may be NULL) is called, in the calling thread,
 * for each of the first 1,000 damaged ranges; its strings are good during the call, "" if not known, rank -1 if not known. `bytes` may be
 * 0: not known. DCP_OK: nothing is damaged. DCP_DAMAGED: something is; the error tells of the first. *unverified_bytes (may be NULL):
 * what there was nothing to compare with. Takes a path, because a checkpoint may be too damaged to be opened. */
typedef void (*dcp_damage_fn)(void *user, const char *fqn, int64_t rank, const char *file, uint64_t offset, uint64_t bytes,
			      const char *message);
DCP_API dcp_status dcp_verify(const char *path, dcp_damage_fn on_damage, void *user, uint64_t *unverified_bytes);

/* -------------------------------------------------------------------------------------------------------- tensors
 *
 * In the order of the metadata. An FQN that holds a NUL byte is shown up to there, and found by index only. */
DCP_API size_t dcp_tensor_count(const dcp_checkpoint *ckpt);
DCP_API const dcp_tensor *dcp_tensor_at(const dcp_checkpoint *ckpt, size_t i);              /* NULL: i is too large */
DCP_API const dcp_tensor *dcp_tensor_find(const dcp_checkpoint *ckpt, const char *fqn);     /* NULL: there is none */

DCP_API const char *dcp_tensor_fqn(const dcp_tensor *t);            /* "model.layers.0.weight" */
DCP_API const char *dcp_tensor_dtype(const dcp_tensor *t);          /* PyTorch's name: "float32", "bfloat16", "float8_e4m3fn", … */
DCP_API uint32_t dcp_tensor_element_bytes(const dcp_tensor *t);
DCP_API uint32_t dcp_tensor_ndim(const dcp_tensor *t);              /* 0: a scalar of one element */
DCP_API const int64_t *dcp_tensor_shape(const dcp_tensor *t);       /* ndim sizes, in elements */
DCP_API uint64_t dcp_tensor_bytes(const dcp_tensor *t);             /* of the whole tensor, dense */
/* How the tensor is stored: boxes, each written by one rank. */
DCP_API size_t dcp_tensor_chunk_count(const dcp_tensor *t);
/* Sets (what is not NULL) ndim offsets and ndim sizes in elements, and the rank. Returns 0 if i is too large, else 1. */
DCP_API int dcp_tensor_chunk(const dcp_checkpoint *ckpt, const dcp_tensor *t, size_t i, const int64_t **offsets, const int64_t **sizes,
			     uint32_t *rank);

/* Flags of dcp_read and dcp_read_slice. */
enum {
	DCP_UNVERIFIED = 1    /* compare nothing: faster, reads no byte that is not needed; all of it is counted as unverified */
};

/* Copies a whole tensor to `buffer` (at least dcp_tensor_bytes, any alignment), dense, in C order, in the byte order of the machine that
 * wrote it (little endian). Reads in the calling thread, at about the speed of one copy; threads that read different tensors or slices
 * add up. *unverified_bytes (may be NULL) is set to what of the bytes read could not be compared. On failure the buffer's contents are
 * undefined. */
DCP_API dcp_status dcp_read(dcp_checkpoint *ckpt, const dcp_tensor *t, void *buffer, size_t buffer_bytes, unsigned flags,
			    uint64_t *unverified_bytes);
/* Copies the box of ndim `offsets` and ndim `sizes` (elements; sizes may be 0, and the box must lie inside the tensor), dense, in C order.
 * A chunk is compared by blocks of a few MiB where dcpd wrote it, as a whole where PyTorch did: so many bytes are read, and no others. */
DCP_API dcp_status dcp_read_slice(dcp_checkpoint *ckpt, const dcp_tensor *t, const int64_t *offsets, const int64_t *sizes, void *buffer,
				  size_t buffer_bytes, unsigned flags, uint64_t *unverified_bytes);

/* --------------------------------------------------------------------------------------------------------- values
 *
 * Values are int, float, bool, str, bytes, None, lists and dicts of these; anything else is a pickle, which is never executed. */
DCP_API size_t dcp_value_count(const dcp_checkpoint *ckpt);
DCP_API const dcp_value *dcp_value_at(const dcp_checkpoint *ckpt, size_t i);
DCP_API const dcp_value *dcp_value_find(const dcp_checkpoint *ckpt, const char *fqn);
DCP_API const char *dcp_value_fqn(const dcp_value *v);

typedef enum dcp_value_kind {
	DCP_JSON = 0,         /* *text is JSON; floats have a point or an exponent, so that 1 and 1.0 stay apart */
	DCP_BYTES = 1,        /* *text is the bytes */
	DCP_OPAQUE = 2        /* an object of another class: *text is the class's name, "numpy.ndarray" */
} dcp_value_kind;

/* Reads a value. *text is new memory of *text_bytes bytes and a NUL behind them: free(3) it. Nothing is set on failure. */
DCP_API dcp_status dcp_value_read(dcp_checkpoint *ckpt, const dcp_value *v, dcp_value_kind *kind, char **text, size_t *text_bytes);

#ifdef __cplusplus
}
#endif
#endif
