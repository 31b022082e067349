/* checked.h: what a reader of a checkpoint knows of the bytes that it took: how many were compared with a digest or CRC, which had nothing
 * to be compared with, what is damaged, what else the user should hear. A job or look-up has one; its figures go into the result. */
#pragma once
#include <jansson.h>

#include "base/err.h"
#include "base/str.h"

enum { CHECKED_LISTED = 1000 };

/* The part of a checkpoint that is damaged. */
enum checked_part {
	CHECKED_PAYLOAD, CHECKED_HEAD, CHECKED_VALUE, CHECKED_PADDING, CHECKED_FILE, CHECKED_METADATA, CHECKED_MANIFEST,
};

/* Bytes of a stored item or file. */
struct checked_place {
	struct str fqn;                /* .p NULL: of no item */
	int64_t rank;                  /* -1: of none */
	struct str file;
	uint64_t offset, bytes;
};

struct checked {
	uint64_t verified_bytes, unverified_bytes, unverified_count;
	uint64_t damage_count, padding_count;
	json_t *unverified, *damage, *padding, *warnings;   /* arrays of at most CHECKED_LISTED entries, or NULL */
};

void checked_free(struct checked *c);

/* Counts and lists bytes that had no digest or CRC to be compared with. */
void checked_nothing(struct checked *c, const struct checked_place *place);
/* Warns, once, that checks were asked for and could not be made of an item. */
void checked_unable(struct checked *c, struct str fqn);
/* Adds a warning, unless one with this code is there. */
void checked_warn(struct checked *c, const char *code, const char *detail);
/* Does the error tell of stored bytes that are not as they should be? */
bool checked_is_damage(enum err e);
/* Counts and lists damage, that of padding apart. */
void checked_damaged(struct checked *c, enum checked_part part, enum err code, const char *detail, const struct checked_place *place);
/* The same of the error in err_last(), which names file and offset, and clears it. */
void checked_damage(struct checked *c, enum checked_part part, uint64_t bytes);
/* Drops all damage noted so far: the same bytes are looked at once more. */
void checked_forget_damage(struct checked *c);

/* Forgets which bytes were verified and which were not: all of them are read once more, and counted then. Warnings stay. */
void checked_forget_bytes(struct checked *c);

/* Adds what another one knows of unverified bytes, and how many were verified; no damage, no warnings. */
void checked_add(struct checked *c, const struct checked *other);
/* Sets verified_bytes, unverified_bytes, unverified, and warnings if there are any. */
void checked_report(const struct checked *c, json_t *result);
/* ERR_CHECKPOINT_DAMAGED, at the first damage that is listed. */
FALLIBLE enum err checked_damage_error(const struct checked *c);
/* The members that a job's error gets, or NULL if nothing is damaged: {"damage":[…],"damage_count":N}. Reference of the caller. */
json_t *checked_damage_doc(const struct checked *c);
