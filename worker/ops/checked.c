/* checked.c: see checked.h. */
#include "ops/checked.h"

#include <stdio.h>
#include <string.h>

void checked_free(struct checked *c)
{
	json_decref(c->unverified);
	json_decref(c->damage);
	json_decref(c->padding);
	json_decref(c->warnings);
	*c = (struct checked){ 0 };
}

static json_t *text(struct str s)
{
	json_t *t = s.p ? json_stringn(s.p, s.n) : json_null();

	return t ? t : json_string("?"); /* no UTF-8 */
}

/* The list's next entry, or NULL if the list is full. */
static json_t *add(json_t **list, struct str fqn, int64_t rank, struct str file, uint64_t offset, uint64_t bytes)
{
	if (!*list)
		*list = json_array();
	if (json_array_size(*list) >= CHECKED_LISTED)
		return NULL;
	json_t *one = json_pack("{s:o, s:o, s:o, s:I, s:I}", "fqn", text(fqn), "rank", rank < 0 ? json_null() : json_integer(rank),
				"file", text(file), "offset", (json_int_t)offset, "bytes", (json_int_t)bytes);
	return one && json_array_append_new(*list, one) == 0 ? one : NULL;
}

void checked_nothing(struct checked *c, struct str fqn, int64_t rank, struct str file, uint64_t offset, uint64_t bytes)
{
	if (bytes == 0)
		return;
	c->unverified_bytes += bytes;
	c->unverified_count++;
	add(&c->unverified, fqn, rank, file, offset, bytes);
}

void checked_unable(struct checked *c, struct str fqn)
{
	char text[ERR_TEXT_MAX];

	snprintf(text, sizeof text,
		 "'%.*s' has neither a digest nor a CRC32: the bytes of it, and of others that `unverified` lists, may be damaged",
		 (int)(fqn.n < 400 ? fqn.n : 400), fqn.p);
	checked_warn(c, "unverified", text);
}

void checked_warn(struct checked *c, const char *code, const char *detail)
{
	if (!c->warnings)
		c->warnings = json_array();
	for (size_t i = 0; i < json_array_size(c->warnings); i++)
		if (strcmp(json_string_value(json_object_get(json_array_get(c->warnings, i), "code")), code) == 0)
			return;
	json_array_append_new(c->warnings, json_pack("{s:s, s:s}", "code", code, "detail", detail));
}

bool checked_is_damage(enum err e)
{
	switch (e) {
	case ERR_CHECKPOINT_DAMAGED:
	case ERR_CHECKPOINT_INCOMPLETE:
	case ERR_DIGEST_MISMATCH:
	case ERR_FORMAT_ZIP:
	case ERR_FORMAT_PICKLE:
	case ERR_FORMAT_METADATA:
	case ERR_FORMAT_ITEM:
	case ERR_FORMAT_TRANSFORM:
	case ERR_FORMAT_SAFETENSORS:
	case ERR_FORMAT_MANIFEST:
	case ERR_LIMIT_EXCEEDED:
	case ERR_DTYPE_UNSUPPORTED:
		return true;
	default:
		return false;
	}
}

static const char *const part_names[] = {
	[RUN_PART_PAYLOAD] = "payload", [RUN_PART_HEAD] = "head",	  [RUN_PART_VALUE] = "value", [RUN_PART_PADDING] = "padding",
	[RUN_PART_FILE] = "file",	[RUN_PART_METADATA] = "metadata", [RUN_PART_MANIFEST] = "manifest",
};

static void note(struct checked *c, enum run_part_kind part, enum err code, const char *detail, struct str fqn, int64_t rank,
		 struct str file, uint64_t offset, uint64_t bytes)
{
	bool padding = part == RUN_PART_PADDING;

	*(padding ? &c->padding_count : &c->damage_count) += 1;
	json_t *one = add(padding ? &c->padding : &c->damage, fqn, rank, file, offset, bytes);
	json_object_set_new(one, "part", json_string(part_names[part]));
	json_object_set_new(one, "code", json_string(err_code_name(code)));
	json_object_set_new(one, "detail", json_string(detail));
}

static struct str known(const char *s)
{
	return s[0] ? str_of(s) : (struct str){ NULL, 0 };
}

void checked_damage(struct checked *c, enum run_part_kind part, uint64_t bytes)
{
	struct err_info e = *err_last();

	note(c, part, e.code, e.text, known(e.fqn), e.rank, known(e.file), e.offset > 0 ? (uint64_t)e.offset : 0, bytes);
	err_clear();
}

static void add_damages(struct checked *c, const struct run *run)
{
	uint64_t n = atomic_load(&run->head->damage_count), listed = n < run->damages_n ? n : run->damages_n;

	for (uint64_t i = 0; i < listed; i++) {
		const struct run_damage *d = &run->damages[i];
		const struct run_src *s = &run->srcs[d->src];
		uint64_t offset = s->named_file == s->file ? d->offset : s->named_at; /* else in the spool */
		note(c, (enum run_part_kind)d->part, (enum err)d->code, err_title((enum err)d->code), run_src_fqn(run, s), s->rank,
		     run_file_name(run, &run->files[s->named_file]), offset, d->bytes);
	}
	c->damage_count += n - listed;
}

/* Runs that write or compare have scans for checks alone: without checks, all sources that they read are unverified. */
static void note_unchecked(const struct run *run)
{
	bool scans_all = run->head->opts.mode == RUN_FILL_SEGMENTS || run->head->opts.mode == RUN_VERIFY;

	for (uint64_t i = 0; !run->head->opts.verify && !scans_all && i < run->dsts_n; i++)
		for (uint64_t k = 0; k < run->dsts[i].piece_count; k++) {
			struct run_src *s = &run->srcs[run->pieces[run->dsts[i].first_piece + k]];
			if (run->files[s->file].kind != RUN_FILE_SEGMENT)
				atomic_store(&s->unverified, s->length);
		}
}

void checked_run(struct checked *c, const struct run *run)
{
	note_unchecked(run);
	c->verified_bytes += atomic_load(&run->head->verified_bytes);
	for (uint64_t i = 0; i < run->srcs_n; i++) {
		const struct run_src *s = &run->srcs[i];
		uint64_t bytes = atomic_load(&s->unverified);
		if (bytes && run->head->opts.verify)
			checked_unable(c, run_src_fqn(run, s));
		if (bytes)
			checked_nothing(c, run_src_fqn(run, s), s->rank, run_file_name(run, &run->files[s->named_file]), s->named_at,
					bytes);
	}
	add_damages(c, run);
}

static json_t *list_of(json_t *list)
{
	return list ? json_incref(list) : json_array();
}

void checked_forget_damage(struct checked *c)
{
	json_decref(c->damage);
	c->damage = NULL;
	c->damage_count = 0;
}

void checked_report(const struct checked *c, json_t *result)
{
	json_object_set_new(result, "verified_bytes", json_integer((json_int_t)c->verified_bytes));
	json_object_set_new(result, "unverified_bytes", json_integer((json_int_t)c->unverified_bytes));
	json_object_set_new(result, "unverified", list_of(c->unverified));
	if (c->warnings)
		json_object_set(result, "warnings", c->warnings);
}

json_t *checked_damage_doc(const struct checked *c)
{
	if (!c->damage_count)
		return NULL;
	return json_pack("{s:o, s:I}", "damage", list_of(c->damage), "damage_count", (json_int_t)c->damage_count);
}

enum err checked_damage_error(const struct checked *c)
{
	const json_t *first = json_array_get(c->damage, 0), *fqn = json_object_get(first, "fqn"), *rank = json_object_get(first, "rank");
	const char *file = json_string_value(json_object_get(first, "file"));
	const char *why = json_string_value(json_object_get(first, "detail"));

	enum err e = ERR(CHECKPOINT_DAMAGED, "%ju %s; the first: %s", (uintmax_t)c->damage_count,
			 c->damage_count == 1 ? "place is damaged" : "places are damaged", why ? why : "?");
	if (json_is_string(fqn))
		e = err_at_fqn(e, json_string_value(fqn), json_string_length(fqn));
	if (json_is_integer(rank))
		e = err_at_rank(e, json_integer_value(rank));
	return file ? err_at_file(e, file, (int64_t)json_integer_value(json_object_get(first, "offset"))) : e;
}
