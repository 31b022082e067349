/* fuzz_safetensors.c: any bytes as a safetensors file. Entries that are accepted cover the data without a hole. */
#include <stdint.h>

#include "format/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct arena *a = arena_new(16 << 20);
	uint64_t json, at = 0, numel;
	struct sft s;

	if (a && n >= 8 && sft_header_bytes(data, n, &json) == OK &&
	    sft_parse((struct str){ (const char *)data + 8, json }, n, a, &s) == OK) {
		for (uint64_t i = 0; i < s.entry_count; i++) {
			must(s.entries[i].begin == at);
			must(box_numel(s.entries[i].ndim, s.entries[i].shape, &numel) == OK);
			at = s.entries[i].end;
			must(at - s.entries[i].begin == numel * dtype_bytes(s.entries[i].dtype));
		}
		must(s.data_off + at == n);
	}
	arena_free(a);
	return 0;
}
