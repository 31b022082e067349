/* fuzz_inspect.c: any bytes as a file that may hold pickles. The report is bounded, and its places lie in the file or in what that unpacks
 * to. */
#include <stdint.h>

#include "format/inspect.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct str bytes = { (const char *)data, n };
	struct item_source src = source_memory(&bytes);
	struct inspect_file file = { .name = STR("fuzz.pt"), .is_pickle = n % 2 };
	struct inspect in = { 0 };

	if (inspect_begin(&in) == OK && inspect_file(&in, &file, &src) == OK) {
		bool runs = false;
		for (uint64_t i = 0; i < in.globals.n; i++) {
			const struct inspect_global *g = &in.globals.v[i];
			must(g->module.n <= INSPECT_NAME && g->name.n <= INSPECT_NAME);
			must(g->first.record.n || g->first.offset < n);
			runs = runs || !g->is_data;
		}
		must(!runs || !inspect_is_safe(&in));
		bool holds_others = n >= 4 && (data[0] == 0x93 || data[0] == 'P'); /* arrays of numbers; archives without pickles */
		must(!file.is_pickle || in.pickles || in.broken_count || holds_others);
	}
	inspect_end(&in);
	return 0;
}
