/* fuzz_item.c: any bytes as a stored item. What is described must lie inside of it; values must come out as they say. */
#include <stdint.h>
#include <string.h>

#include "base/num.h"
#include "format/torch_item.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct str bytes = { (const char *)data, n };
	struct item_source src = source_memory(&bytes);
	struct item_value v = { 0 };
	struct item_tensor t;
	uint64_t checked, unknown;

	if (item_read_tensor(&src, &t) == OK)
		must(num_inside(t.payload_off, t.stored_bytes, n) && t.ndim <= NDIM_MAX);
	if (item_read_value(&src, &v) == OK) {
		struct buf again = BUF_INIT(16 << 20);
		if (v.kind == ITEM_VALUE_JSON)
			must(item_put_value_json(&again, (struct str){ (char *)v.text.p, v.text.len }) == OK);
		buf_free(&again);
	}
	item_value_free(&v);
	(void)!item_check_crc(&src, false, &checked, &unknown);
	(void)item_is_archive(data, n);
	return 0;
}
