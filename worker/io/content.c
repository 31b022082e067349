/* content.c: see content.h. */
#include "io/content.h"

#include <endian.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

static int by_fqn(const void *a, const void *b, void *user)
{
	const struct sdict *sd = user;

	return str_cmp(sd->tensors[*(const uint32_t *)a].fqn, sd->tensors[*(const uint32_t *)b].fqn);
}

static void add_u64(struct digest_stream *s, uint64_t v)
{
	uint64_t le = htole64(v);

	digest_add(s, &le, sizeof le);
}

static void add_text(struct digest_stream *s, struct str text)
{
	add_u64(s, text.n);
	digest_add(s, text.p, text.n);
}

static void node_of(const struct sd_tensor *t, const void *leaf, size_t leaf_bytes, struct digest *out)
{
	struct digest_stream s;

	digest_begin_one(&s, DIGEST_XXH3);
	add_text(&s, t->fqn);
	add_text(&s, str_of(dtype_name(t->dtype)));
	add_u64(&s, t->ndim);
	for (uint32_t i = 0; i < t->ndim; i++)
		add_u64(&s, (uint64_t)t->shape[i]);
	digest_add(&s, leaf, leaf_bytes);
	digest_end(&s, out);
}

static FALLIBLE enum err root_of(const struct sdict *sd, const unsigned char *leaves, size_t leaf_bytes, unsigned char out[16])
{
	CLEANUP(mem_free_ptr) uint32_t *order = mem_alloc(sd->tensor_count * sizeof *order + 1);
	struct digest_stream root;
	struct digest digest;

	NEED(order, "no memory for %ju tensors", (uintmax_t)sd->tensor_count);
	for (uint32_t i = 0; i < sd->tensor_count; i++)
		order[i] = i;
	qsort_r(order, sd->tensor_count, sizeof *order, by_fqn, (void *)(uintptr_t)sd);
	digest_begin_one(&root, DIGEST_XXH3);
	for (uint64_t i = 0; i < sd->tensor_count; i++) {
		node_of(&sd->tensors[order[i]], leaves + order[i] * leaf_bytes, leaf_bytes, &digest);
		digest_add(&root, digest.xxh3_128, sizeof digest.xxh3_128);
	}
	digest_end(&root, &digest);
	memcpy(out, digest.xxh3_128, sizeof digest.xxh3_128);
	return OK;
}

enum err content_digest(const struct sdict *sd, const unsigned char (*leaves)[16], unsigned char out[16])
{
	return root_of(sd, leaves[0], sizeof leaves[0], out);
}

enum err content_digest_of_sums(const struct sdict *sd, const uint64_t *sums, unsigned char out[16])
{
	CLEANUP(mem_free_ptr) uint64_t *leaves = mem_alloc(sd->tensor_count * sizeof *leaves + 1);

	NEED(leaves, "no memory for %ju tensors", (uintmax_t)sd->tensor_count);
	for (uint64_t i = 0; i < sd->tensor_count; i++)
		leaves[i] = htole64(sums[i]);
	return root_of(sd, (const unsigned char *)leaves, sizeof *leaves, out);
}
