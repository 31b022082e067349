/* run_checked.c: the checks that a run made of what it read, added to those of its job. */
#include "runner/run.h"
#include "store/checked.h"

/* A source that is a whole file has no FQN. */
static struct str fqn_of(const struct run *run, const struct run_src *s)
{
	return s->fqn_len ? run_src_fqn(run, s) : (struct str){ NULL, 0 };
}

static void add_damages(const struct run *run, struct checked *c)
{
	uint64_t n = atomic_load(&run->head->damage_count), listed = n < run->damages_n ? n : run->damages_n;
	char room[ERR_FILE_MAX];

	each(d, run->damages, listed) {
		const struct run_src *s = &run->srcs[d->src];
		uint64_t offset = s->named_file == s->file ? d->offset : s->named_at; /* else in the spool */
		const char *file = run_file_label(run, s->named_file, room);
		const struct checked_place place = { fqn_of(run, s), s->rank, str_of(file), offset, d->bytes };
		checked_damaged(c, (enum checked_part)d->part, (enum err)d->code, err_title((enum err)d->code), &place);
	}
	c->damage_count += n - listed;
}

/* Runs that write or compare have scans for checks alone: without checks, all sources that they read are unverified. */
static void note_unchecked(const struct run *run)
{
	enum run_mode mode = run->head->opts.mode;
	bool scans_all = mode == RUN_FILL_SEGMENTS || mode == RUN_VERIFY || mode == RUN_STATS;

	for (uint64_t i = 0; !run->head->opts.verify && !scans_all && i < run->dsts_n; i++)
		for (uint64_t k = 0; k < run->dsts[i].piece_count; k++) {
			uint32_t src = run->pieces[run->dsts[i].first_piece + k];
			struct run_src *s = &run->srcs[run_src_base(&run->srcs[src], src)];
			if (s->zeros)
				continue;
			if (run->files[s->file].kind != RUN_FILE_SEGMENT)
				atomic_store(&s->unverified, s->length);
		}
}

void run_checked(const struct run *run, struct checked *c)
{
	char room[ERR_FILE_MAX];

	note_unchecked(run);
	c->verified_bytes += atomic_load(&run->head->verified_bytes);
	each(s, run->srcs, run->srcs_n) {
		uint64_t bytes = atomic_load(&s->unverified);
		if (bytes && run->head->opts.verify)
			checked_unable(c, s->fqn_len ? run_src_fqn(run, s) : str_of(run_file_label(run, s->named_file, room)));
		if (bytes)
			checked_nothing(c, &(struct checked_place){ fqn_of(run, s), s->rank,
								    str_of(run_file_label(run, s->named_file, room)), s->named_at, bytes });
	}
	add_damages(run, c);
}
