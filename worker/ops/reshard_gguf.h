/* reshard_gguf.h: what a reshard to GGUF does besides: metadata and rules from the files beside the model, and the types of tensors. */
#pragma once
#include "format/gguf.h"
#include "runner/input.h"

/* Reads config.json and the tokenizer from target.assets, else from beside the source; none of them need be there. gguf_head_free(). */
FALLIBLE enum err reshard_gguf_head(struct job *j, const struct input *source, struct gguf_head *out);
/* Sets the dtype of each tensor of the view, and which are in blocks: by the request's `dtype`, whose globs are matched with the names that
 * the file has. Of a known model, refuses tensors that its rules have no name for. */
FALLIBLE enum err reshard_gguf_types(const struct spec *spec, struct gguf_head *h, const struct spec_view *view);
