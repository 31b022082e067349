/* layout_rules.h: the layout rules of a request or of an image: JSON → struct layout_rule, and what is wrong with rules whatever the
 * tensors are. plan/layout.h applies rules to tensors. */
#pragma once
#include "base/jval.h"
#include "spec/ref.h"
#include "tensor/placement.h"
#include "tensor/sdict.h"

enum { LAYOUT_WORLD_MAX = 65536 };

enum layout_kind { LAYOUT_MESH, LAYOUT_CHUNKS, LAYOUT_BOXES, LAYOUT_LIKE };

struct layout_box {
	uint32_t rank;
	uint32_t ndim;
	const int64_t *dims;             /* offsets then sizes */
};

struct layout_rule {
	struct str match;
	bool optional;                   /* no error if no tensor that it matches has the dims: plan/layout_use.h */
	enum layout_kind kind;
	uint32_t mesh_ndim;              /* LAYOUT_MESH; 0: 1-D mesh over the world */
	const int64_t *mesh;             /* sizes */
	const struct str *dim_names;     /* one per mesh dim, or NULL */
	const uint32_t *ranks;           /* rank_count of them, row-major over the mesh; NULL: 0..product-1 */
	uint32_t rank_count;
	const struct placement *placements; /* one per mesh dim */
	uint32_t placement_count;
	int32_t chunk_dim;               /* LAYOUT_CHUNKS; ranks above */
	const struct layout_box *boxes;  /* LAYOUT_BOXES */
	uint32_t box_count;
	struct ref like_ref;             /* LAYOUT_LIKE: that checkpoint's boxes and ranks */
	const struct sdict *like;        /* it, once it is open (runner/spec.h) */
};

/* The arrays are in an arena of the one who read them, the texts where they were read from. */
struct layout_rules {
	struct layout_rule *v;
	uint32_t n;
	bool given;
};

/* Reads the rules of v, an array, or absent: none. Everything but texts is in `a`. ERR_LAYOUT_INVALID, ERR_VALIDATION_FAILED,
 * ERR_UNKNOWN_FIELD, ERR_WORLD_MISMATCH, with the JSON pointer. */
FALLIBLE enum err layout_rules_read(const struct jval *v, size_t rules_max, struct arena *a, struct layout_rules *out);
/* Checks rules that were read from v. in_memory: of an operation on state dicts, where "Partial(sum)", "P(max)" are allowed, too. *world is
 * 0 when the request gives none; it becomes the product of the meshes if they fix it. */
FALLIBLE enum err layout_rules_check(const struct jval *v, const struct layout_rules *rules, bool in_memory, int64_t *world);
/* Checks one rule against a world: mesh products, ranks in range and once, placements per mesh dim … */
struct layout_at {
	const char *key;                 /* of the rule, that the error is about */
	int64_t index;                   /* in its list; -1: the list itself */
};
FALLIBLE enum err layout_rules_check_one(const struct layout_rule *r, uint32_t world, bool in_memory, struct layout_at *at);
