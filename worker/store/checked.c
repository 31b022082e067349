/* checked.c: see checked.h. */
#include "store/checked.h"
#include "base/jtext.h"

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
	return s.p ? jtext_value(s) : json_null();
}

/* The list's next entry, or NULL if the list is full. */
static json_t *add(json_t **list, const struct checked_place *p)
{
	if (!*list)
		*list = json_array();
	if (json_array_size(*list) >= CHECKED_LISTED)
		return NULL;
	json_t *one = json_pack("{s:o, s:o, s:o, s:I, s:I}", "fqn", text(p->fqn), "rank",
				p->rank < 0 ? json_null() : json_integer(p->rank), "file", text(p->file), "offset",
				(json_int_t)p->offset, "bytes", (json_int_t)p->bytes);
	return one && json_array_append_new(*list, one) == 0 ? one : NULL;
}

void checked_nothing(struct checked *c, const struct checked_place *place)
{
	if (place->bytes == 0)
		return;
	c->unverified_bytes += place->bytes;
	c->unverified_count++;
	add(&c->unverified, place);
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
	case ERR_FORMAT_NPZ:
	case ERR_FORMAT_GGUF:
	case ERR_FORMAT_MANIFEST:
	case ERR_LIMIT_EXCEEDED:
	case ERR_DTYPE_UNSUPPORTED:
		return true;
	default:
		return false;
	}
}

static const char *const part_names[] = {
	[CHECKED_PAYLOAD] = "payload", [CHECKED_HEAD] = "head",	  [CHECKED_VALUE] = "value", [CHECKED_PADDING] = "padding",
	[CHECKED_FILE] = "file",	[CHECKED_METADATA] = "metadata", [CHECKED_MANIFEST] = "manifest",
};

void checked_damaged(struct checked *c, enum checked_part part, enum err code, const char *detail, const struct checked_place *place)
{
	bool padding = part == CHECKED_PADDING;

	*(padding ? &c->padding_count : &c->damage_count) += 1;
	json_t *one = add(padding ? &c->padding : &c->damage, place);
	json_object_set_new(one, "part", json_string(part_names[part]));
	json_object_set_new(one, "code", json_string(err_code_name(code)));
	json_object_set_new(one, "detail", json_string(detail));
}

static struct str known(const char *s)
{
	return s[0] ? str_of(s) : (struct str){ NULL, 0 };
}

void checked_damage(struct checked *c, enum checked_part part, uint64_t bytes)
{
	struct err_info e = *err_last();

	checked_damaged(c, part, e.code, e.text, &(struct checked_place){ known(e.fqn), e.rank, known(e.file),
									  e.offset > 0 ? (uint64_t)e.offset : 0, bytes });
	err_clear();
}

void checked_add(struct checked *c, const struct checked *other)
{
	json_t *one;
	size_t i;

	c->verified_bytes += other->verified_bytes;
	c->unverified_bytes += other->unverified_bytes;
	c->unverified_count += other->unverified_count;
	if (!c->unverified && json_array_size(other->unverified))
		c->unverified = json_array();
	json_array_foreach(other->unverified, i, one)
		if (json_array_size(c->unverified) < CHECKED_LISTED)
			json_array_append(c->unverified, one);
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

void checked_forget_bytes(struct checked *c)
{
	c->verified_bytes = c->unverified_bytes = c->unverified_count = 0;
	json_decref(c->unverified);
	c->unverified = NULL;
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
