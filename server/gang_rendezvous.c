/* gang_rendezvous.c: see gang_rendezvous.h. */
#include "server/gang_rendezvous.h"

enum { DATA_TEXT_MAX = 1024 };

void gang_rendezvous_drop(struct gang_rendezvous *m)
{
	json_decref(m->all);
	*m = (struct gang_rendezvous){ 0 };
}

int64_t gang_rendezvous_missing(const struct gang_rendezvous *m)
{
	for (size_t i = 0; i < json_array_size(m->all); i++)
		if (json_is_null(json_array_get(m->all, i)))
			return (int64_t)i;
	return -1;
}

static FALLIBLE enum err begin(struct gang_rendezvous *m, json_int_t round, json_int_t size)
{
	m->all = json_array();
	m->round = round;
	m->come = 0;
	for (json_int_t i = 0; i < size; i++)
		if (json_array_append_new(m->all, json_null()) != 0)
			return ERR(NO_MEMORY, "cannot bring a group together");
	return OK;
}

FALLIBLE enum err gang_rendezvous_take(struct gang_rendezvous *m, uint32_t index, uint32_t count, const json_t *body, json_t **all_out)
{
	const json_t *round = json_object_get(body, "round"), *data = json_object_get(body, "data");
	json_int_t size = json_integer_value(json_object_get(body, "size"));

	*all_out = NULL;
	if (!json_is_integer(round) || size < 1 || size > (json_int_t)count || (json_int_t)index >= size || !json_is_string(data) ||
	    json_string_length(data) > DATA_TEXT_MAX)
		return ERR(PROTOCOL, "worker %u sent a RENDEZVOUS that cannot be", index);
	if (!m->all)
		TRY(begin(m, json_integer_value(round), size));
	if (json_integer_value(round) != m->round || (size_t)size != json_array_size(m->all))
		return ERR(PROTOCOL, "worker %u meets in round %jd of %jd, others in round %jd of %zu", index,
			   (intmax_t)json_integer_value(round), (intmax_t)size, (intmax_t)m->round, json_array_size(m->all));
	if (!json_is_null(json_array_get(m->all, index)))
		return ERR(PROTOCOL, "worker %u sent a second RENDEZVOUS", index);
	if (json_array_set(m->all, index, (json_t *)data) != 0)
		return ERR(NO_MEMORY, "cannot bring a group together");
	if (++m->come < (uint32_t)size)
		return OK;
	*all_out = json_pack("{s:I, s:O}", "round", m->round, "all", m->all);
	gang_rendezvous_drop(m);
	return *all_out ? OK : ERR(NO_MEMORY, "cannot bring a group together");
}
