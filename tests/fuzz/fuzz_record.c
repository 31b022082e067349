/* fuzz_record.c: any bytes as the front of a manifest. A record that is accepted is one that can be written and read again. */
#include "base/jval.h"
#include "base/mem.h"
#include "store/record.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(8 << 20);
	struct record_metadata m = { 0 };
	json_t *doc = NULL, *again = NULL;

	if (record_parse((struct str){ (const char *)data, n }, &doc, &m)) {
		must(!doc);
		return 0;
	}
	buf_puts(&b, "{\"dcpd\":1");
	if (record_put(&b, doc) == OK) {
		buf_puts(&b, ",\"files\":");
		must(record_parse((struct str){ (char *)b.p, b.len }, &again, &m) == OK && json_equal(doc, again));
	}
	json_decref(again);
	json_decref(doc);
	return 0;
}
