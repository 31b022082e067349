/* derived.c: see derived.h. */
#include "spec/derived.h"

#include "base/jval.h"
#include "spec/job_id.h"
#include "spec/ref.h"

int64_t derived_ms(const json_t *record, const char *name)
{
	const json_t *one;
	int64_t newest = -1;
	size_t i;

	json_array_foreach(json_object_get(record, "parents"), i, one) {
		int64_t ms = job_id_ms(jval_str(one, "job"));
		bool is_of_run = str_eq(ref_run(jval_text(one, "name")), ref_run(name));
		/* the step before of an incremental save is none that its contents come from */
		if (ms > newest && is_of_run && strcmp(jval_text(one, "role"), "previous") != 0)
			newest = ms;
	}
	return newest;
}
