/* state_dict_ask.c: questions about what a state dict holds. A look-up worker answers them; the coordinator maps no segment. */
#include "base/mem.h"
#include "server/lookup.h"
#include "server/state_dict_impl.h"

struct about {
	struct state_dicts *all;
	struct state_dict_use *use;
	lookup_fn fn;
	void *user;
};

static void on_about(void *user, enum err e, const json_t *ok, int *fd)
{
	struct about *a = user;
	struct err_info info = *err_last();

	state_dict_unuse(&a->use);
	err_restore(&info);
	a->fn(a->user, e, ok, fd);
	mem_free(a);
}

static void about_failed(void *user, enum err e)
{
	int none = -1;

	on_about(user, e, NULL, &none);
}

struct failure {
	lookup_fn fn;
	void *user;
};

static void fail_later(void *user, enum err e)
{
	struct failure f = *(struct failure *)user;
	int none = -1;

	mem_free(user);
	f.fn(f.user, e, NULL, &none);
}

void state_dict_ask_use(struct state_dicts *s, const struct state_dict_use *use, json_t *more, lookup_fn fn, void *user)
{
	json_t *ranks = json_array();
	CLEANUP(mem_free_ptr) int *fds = mem_zalloc(use->world_size, sizeof *fds);
	bool bad = !fds;

	for (uint32_t i = 0; i < use->world_size && !bad; i++) {
		fds[i] = use->ranks[i].fd;
		bad = json_array_append_new(ranks, json_pack("{s:i, s:i, s:I, s:I}", "rank", (int)i, "fd", (int)i, "bytes",
							     (json_int_t)use->ranks[i].bytes, "image_bytes",
							     (json_int_t)use->ranks[i].image_bytes)) != 0;
	}
	bad |= json_object_set_new(more, "state_dict", json_string(use->name)) != 0;
	bad |= json_object_set_new(more, "world_size", json_integer(use->world_size)) != 0;
	bad |= json_object_set_new(more, "generation", json_integer(use->generation)) != 0;
	bad |= json_object_set_new(more, "ranks", ranks) != 0;
	if (bad) {
		struct failure *f = mem_sure(sizeof *f);
		*f = (struct failure){ fn, user };
		json_decref(more);
		loop_later(s->parts.loop, fail_later, f, ERR(NO_MEMORY, "cannot ask about a state dict"));
	} else {
		lookup_ask(s->parts.lookups, NULL, more, fds, use->world_size, fn, user);
	}
}

void state_dict_ask(struct state_dicts *s, const struct principal *who, struct str name, int64_t generation, json_t *more,
		    lookup_fn fn, void *user)
{
	struct about *a = mem_sure(sizeof *a);

	*a = (struct about){ s, NULL, fn, user };
	enum err e = state_dict_use(s, who, name, generation, "", &a->use);
	if (e) {
		json_decref(more);
		loop_later(s->parts.loop, about_failed, a, e);
	} else {
		state_dict_ask_use(s, a->use, more, on_about, a);
	}
}
