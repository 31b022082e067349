/* gguf_impl.h: what gguf_model.c and gguf_tokenizer.c share. */
#pragma once
#include "format/gguf.h"

/* Adds the tokenizer to the metadata, as far as its files are there; none: nothing. */
FALLIBLE enum err gguf_put_tokenizer(struct gguf_head *h, const struct gguf_assets *a, const json_t *config);
