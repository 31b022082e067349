/* file_plan.c: see file_plan.h. */
#include "format/file_plan.h"

#include "base/arena.h"

void file_plan_free(struct file_plan *p)
{
	vec_free(&p->files);
	vec_free(&p->items);
	vec_free(&p->texts);
	vec_free(&p->crcs);
	arena_free(p->arena);
	*p = (struct file_plan){ 0 };
}
