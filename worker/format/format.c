/* format.c: see format.h. */
#include "format/format.h"

#include <stdio.h>
#include <string.h>

#include "base/num.h"
#include "format/gguf.h"
#include "format/npy.h"
#include "format/torch_file.h"

/* Digits alone, without zeros in front: no two names for one rank. */
static bool rank_digits(const char *p, size_t n, int64_t *out)
{
	uint64_t rank;

	if (n == 0 || n > 9 || (p[0] == '0' && n > 1) || !str_to_u64((struct str){ p, n }, &rank) || rank >= FORMAT_RANKS_MAX)
		return false;
	*out = (int64_t)rank;
	return true;
}

static enum format_role dcp_file(struct str name, int64_t *rank)
{
	if (str_is(name, DCP_METADATA))
		return FORMAT_METADATA;
	if (str_is(name, DCP_METADATA ".tmp"))
		return FORMAT_TEMPORARY;
	if (!str_ends(name, ".distcp"))
		return FORMAT_OTHER;
	const char *bar = str_starts(name, "__") ? memchr(name.p + 2, '_', name.n - 2) : NULL;
	if (bar)
		rank_digits(name.p + 2, (size_t)(bar - name.p - 2), rank);
	return FORMAT_PAYLOAD;
}

/* Megatron's: a DCP checkpoint with a file beside that says so, whose own files are those of DCP. */
static enum format_role torch_dist_file(struct str name, int64_t *rank)
{
	return str_is(name, DIST_CONFIG) ? FORMAT_MARK : dcp_file(name, rank);
}

/* Payload files have the names that they have in any DCP checkpoint. */
static enum format_role dcp_rank_file(struct str name, int64_t *rank)
{
	struct str tail = STR(".metadata"), tmp = STR(".metadata.tmp");
	bool temporary = str_ends(name, tmp.p);
	size_t cut = temporary ? tmp.n : tail.n;

	if (!str_starts(name, "__") || !(temporary || str_ends(name, tail.p)) || !rank_digits(name.p + 2, name.n - 2 - cut, rank))
		return FORMAT_OTHER;
	return temporary ? FORMAT_TEMPORARY : FORMAT_METADATA;
}

/* shard-{rank + 1}-model-{i}-of-{n}.safetensors */
static enum format_role hf_dcp_file(struct str name, int64_t *rank)
{
	struct str shard = STR("shard-"), digits;
	const char *dash = str_starts(name, shard.p) ? memchr(name.p + shard.n, '-', name.n - shard.n) : NULL;
	uint64_t number;

	if (!dash || !str_ends(name, ".safetensors") || !str_starts((struct str){ dash, name.n - (size_t)(dash - name.p) }, "-model-"))
		return FORMAT_OTHER;
	digits = (struct str){ name.p + shard.n, (size_t)(dash - name.p) - shard.n };
	if (!str_to_u64(digits, &number) || number == 0 || number > FORMAT_RANKS_MAX)
		return FORMAT_OTHER;
	*rank = (int64_t)number - 1;
	return FORMAT_PAYLOAD;
}

bool format_image_name(const char *name, struct format_image_name *out)
{
	struct str s = str_of(name), begin = STR("dcpd-rank-"), of = STR("-of-"), end = STR(".safetensors");
	const size_t digits = 5;

	if (s.n != begin.n + digits + of.n + digits + end.n || !str_starts(s, begin.p) || !str_ends(s, end.p) ||
	    memcmp(name + begin.n + digits, of.p, of.n) != 0)
		return false;
	return str_to_u64((struct str){ name + begin.n, digits }, &out->rank) &&
	       str_to_u64((struct str){ name + begin.n + digits + of.n, digits }, &out->world_size) && out->rank < out->world_size &&
	       out->world_size <= FORMAT_RANKS_MAX;
}

void format_image_payload(uint32_t rank, uint32_t world_size, char out[FORMAT_FILE_MAX])
{
	snprintf(out, FORMAT_FILE_MAX, "dcpd-rank-%05u-of-%05u.safetensors", rank, world_size);
}

static enum format_role image_file(struct str name, int64_t *rank)
{
	struct format_image_name is;

	if (!format_image_name(name.p, &is)) /* names of files end with a NUL */
		return FORMAT_OTHER;
	*rank = (int64_t)is.rank;
	return FORMAT_PAYLOAD;
}

static enum format_role hf_file(struct str name, int64_t *rank)
{
	(void)rank;
	if (str_ends(name, ".safetensors.index.json"))
		return FORMAT_METADATA;
	return str_ends(name, ".safetensors") ? FORMAT_PAYLOAD : FORMAT_OTHER;
}

/* Takes a number, or a word, off the end. */
static bool take_number(struct str *s, int64_t *out)
{
	size_t n = s->n;

	while (n && s->p[n - 1] >= '0' && s->p[n - 1] <= '9')
		n--;
	if (!rank_digits(s->p + n, s->n - n, out))
		return false;
	s->n = n;
	return true;
}

static bool take_word(struct str *s, const char *word)
{
	if (!str_ends(*s, word))
		return false;
	s->n -= strlen(word);
	return true;
}

bool format_rank_name(const char *name, struct format_rank_name *out)
{
	struct str s = str_of(name), before;

	*out = (struct format_rank_name){ .rank = -1 };
	if (!take_word(&s, ".pt") && !take_word(&s, ".pth") && !take_word(&s, ".bin"))
		return false;
	if (!take_number(&s, &out->rank) || (!take_word(&s, "rank_") && !take_word(&s, "rank")) || (s.n && !take_word(&s, "_")))
		return false;
	before = s;
	if (take_number(&s, &out->world_size) && take_word(&s, "world_size_") && (s.n == 0 || take_word(&s, "_"))) {
		before = s;
		out->world_size += out->world_size == 0;
	} else {
		out->world_size = 0;
	}
	out->family = before;
	out->is_model = before.n == 0 || str_ends(before, "model") || str_starts(before, "pytorch_model");
	return true;
}

static enum format_role torch_rank_file(struct str name, int64_t *rank)
{
	struct format_rank_name is;

	if (!format_rank_name(name.p, &is)) /* names of files end with a NUL */
		return FORMAT_OTHER;
	*rank = is.rank;
	return FORMAT_PAYLOAD;
}

static enum format_role torch_file(struct str name, int64_t *rank)
{
	(void)rank;
	if (str_ends(name, ".bin.index.json"))
		return FORMAT_METADATA;
	return str_ends(name, ".pt") || str_ends(name, ".pth") || str_ends(name, ".bin") ? FORMAT_PAYLOAD : FORMAT_OTHER;
}

/* With zeros in front: DeepSpeed writes mp_rank_00. */
static bool take_padded(struct str *s, int64_t *out)
{
	uint64_t v;
	size_t n = s->n;

	while (n && s->p[n - 1] >= '0' && s->p[n - 1] <= '9')
		n--;
	if (s->n - n > 9 || !str_to_u64((struct str){ s->p + n, s->n - n }, &v) || v >= FORMAT_RANKS_MAX)
		return false;
	*out = (int64_t)v;
	s->n = n;
	return true;
}

bool format_zero_name(const char *name, struct format_zero_name *out)
{
	struct str s = str_of(name);

	*out = (struct format_zero_name){ .rank = -1 };
	out->is_model = take_word(&s, "_model_states.pt");
	if ((!out->is_model && !take_word(&s, "_optim_states.pt")) || !take_padded(&s, &out->model_rank) || !take_word(&s, "mp_rank_"))
		return false;
	if (s.n == 0)
		return out->is_model;
	return take_word(&s, "_") && take_number(&s, &out->rank) && take_word(&s, "zero_pp_rank_") &&
	       (s.n == 0 || str_is(s, "bf16_") || str_is(s, "fp16_"));
}

/* Files of layers and experts count, too: who opens the checkpoint says that they are not read. */
static enum format_role zero_file(struct str name, int64_t *rank)
{
	struct format_zero_name is;

	if (!str_ends(name, "_optim_states.pt") && !str_ends(name, "_model_states.pt") && !str_ends(name, "-model_states.pt"))
		return FORMAT_OTHER;
	if (memchr(name.p, '/', name.n))
		return FORMAT_OTHER;
	if (format_zero_name(name.p, &is)) /* names of files end with a NUL */
		*rank = is.rank;
	return FORMAT_PAYLOAD;
}

/* zero/optimizer_state.pt, zero/FQN/STATE.pt */
static enum format_role zero_universal_file(struct str name, int64_t *rank)
{
	if (!str_starts(name, "zero/"))
		return zero_file(name, rank);
	if (str_ends(name, "/"))
		return name.n > 6 && memchr(name.p + 5, '/', name.n - 6) ? FORMAT_OTHER : FORMAT_FOLDER;
	return str_ends(name, ".pt") ? FORMAT_PAYLOAD : FORMAT_OTHER;
}

static enum format_role npz_file(struct str name, int64_t *rank)
{
	(void)rank;
	return str_ends(name, ".npz") ? FORMAT_PAYLOAD : FORMAT_OTHER;
}

static enum format_role gguf_file(struct str name, int64_t *rank)
{
	(void)rank;
	return str_ends(name, ".gguf") ? FORMAT_PAYLOAD : FORMAT_OTHER;
}

struct row {
	const char *name;
	enum format_role (*file)(struct str name, int64_t *rank);
	enum format_role mark;
	const char *ends, *metadata, *heads;
	enum err (*open)(const struct format_source *s, struct arena *scratch, struct sdict **out);
	enum err (*plan_files)(const struct file_plan_target *t, struct file_plan *out);
	enum err (*put_metadata)(const struct sdict *sd, const struct dcp_meta_opts *opts, dcp_meta_sink sink, void *user);
	unsigned holds;
	bool (*first)(const void *first, size_t n);
};

static const struct row rows[FORMAT_COUNT] = {
	[FORMAT_NONE] = { .name = "none" },
#define X(NAME, word, file, mark, ends, metadata, heads, open, plan_files, put_metadata, holds, first) \
	[FORMAT_##NAME] = { word, file, mark, ends, metadata, heads, open, plan_files, put_metadata, holds, first },
#include "format/formats.def"
};

const char *format_name(enum format f)
{
	return rows[f].name;
}

bool format_parse(struct str word, enum format *out)
{
	for (enum format f = FORMAT_NONE + 1; f < FORMAT_COUNT; f++)
		if (str_is(word, rows[f].name)) {
			*out = f;
			return true;
		}
	return false;
}

bool format_holds(enum format f, unsigned what)
{
	return (rows[f].holds & what) == what;
}

bool format_makes_folders(enum format f)
{
	return rows[f].plan_files && (rows[f].metadata || !format_is_file(f));
}

const char *format_metadata(enum format f)
{
	return rows[f].metadata;
}

const char *format_heads(enum format f)
{
	return rows[f].heads;
}

bool format_file(const char *name, struct format_file *out)
{
	*out = (struct format_file){ .rank = -1 };
	for (enum format f = FORMAT_NONE + 1; f < FORMAT_COUNT; f++) {
		out->role = rows[f].file(str_of(name), &out->rank);
		out->format = f;
		if (out->role != FORMAT_OTHER)
			return true;
	}
	out->format = FORMAT_NONE;
	return false;
}

bool format_file_in(enum format f, const char *name, struct format_file *out)
{
	*out = (struct format_file){ f, FORMAT_OTHER, -1 };
	if (f != FORMAT_NONE)
		out->role = rows[f].file(str_of(name), &out->rank);
	return out->role != FORMAT_OTHER || format_file(name, out);
}

bool format_folder(const char *path)
{
	struct format_file file;

	return format_file(path, &file) && file.role == FORMAT_FOLDER;
}

bool format_is_dcp(enum format f)
{
	return f == FORMAT_DCP || f == FORMAT_TORCH_DIST;
}

bool format_is_file(enum format f)
{
	return rows[f].ends && rows[f].ends[0];
}

/* Anything may be called .bin. */
enum format format_of_file(const char *name)
{
	struct format_file file;

	bool is = format_file(name, &file) && file.role == FORMAT_PAYLOAD && format_is_file(file.format);
	return is && !str_ends(str_of(name), ".bin") ? file.format : FORMAT_NONE;
}

enum format format_of_bytes(const void *first, size_t n)
{
	for (enum format f = FORMAT_NONE + 1; f < FORMAT_COUNT; f++)
		if (rows[f].first && rows[f].first(first, n))
			return f;
	return FORMAT_NONE;
}

bool format_denied(enum format f, const void *first, size_t n)
{
	return rows[f].first && !rows[f].first(first, n);
}

void format_listing_add(struct format_listing *l, const char *name)
{
	struct str step = str_of(name), digits;
	uint64_t number;
	int64_t rank;

	for (enum format f = FORMAT_NONE + 1; f < FORMAT_COUNT; f++)
		l->roles[f] |= 1u << rows[f].file(str_of(name), &rank);
	if (strcmp(name, "latest") == 0 || (!l->pointer && strcmp(name, "latest_universal") == 0))
		l->pointer = strcmp(name, "latest") == 0 ? "latest" : "latest_universal";
	if (!str_starts(step, "global_step") || !take_word(&step, "/") || step.n >= sizeof l->step)
		return;
	digits = (struct str){ step.p + 11, step.n - 11 };
	if (str_to_u64(digits, &number) && (!l->step[0] || number > l->step_number)) {
		l->step_number = number;
		snprintf(l->step, sizeof l->step, "%.*s", (int)step.n, step.p);
	}
}

enum format format_of_listing(const struct format_listing *l)
{
	bool dist = l->roles[FORMAT_TORCH_DIST] & 1u << FORMAT_MARK;

	for (enum format f = FORMAT_NONE + 1; f < FORMAT_COUNT; f++) {
		unsigned want = 1u << rows[f].mark | (rows[f].mark == FORMAT_FOLDER ? 1u << FORMAT_PAYLOAD : 0);
		if (rows[f].mark != FORMAT_OTHER && rows[f].mark != FORMAT_MARK && (l->roles[f] & want) == want)
			return f == FORMAT_DCP && dist ? FORMAT_TORCH_DIST : f;
	}
	return FORMAT_NONE;
}

void format_dcp_metadata(uint32_t rank, char out[FORMAT_FILE_MAX])
{
	snprintf(out, FORMAT_FILE_MAX, "__%u" DCP_METADATA, rank);
}

void format_dcp_payload(uint32_t rank, uint64_t index, char out[FORMAT_FILE_MAX])
{
	snprintf(out, FORMAT_FILE_MAX, "__%u_%ju.distcp", rank, (uintmax_t)index);
}

void format_hf_payload(uint32_t index, uint32_t count, char out[FORMAT_FILE_MAX])
{
	snprintf(out, FORMAT_FILE_MAX, "model-%05u-of-%05u.safetensors", index + 1, count);
}

static enum err read_part(void *user, uint64_t offset, void *into, size_t n)
{
	const struct format_part *part = user;

	return part->s->read(part->s->user, part->name, offset, into, n);
}

enum err format_part_of(const struct format_source *s, const char *name, struct format_part *part, struct item_source *out)
{
	*part = (struct format_part){ s, name };
	*out = (struct item_source){ .read = read_part, .user = part };
	return s->bytes_of(s->user, name, &out->length);
}

bool format_reads(enum format f)
{
	return rows[f].open != NULL;
}

enum err format_open(enum format f, const struct format_source *s, struct sdict **out)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	CLEANUP(arena_free_ptr) struct arena *scratch = arena_new(UINT64_MAX);

	if (!rows[f].open)
		return ERR(FORMAT_UNSUPPORTED, "checkpoints of the format '%s' cannot be read yet", rows[f].name);
	NEED(scratch, "no memory to open a checkpoint");
	TRY(rows[f].open(s, scratch, &sd));
	*out = move(sd);
	return OK;
}

enum err format_plan_files(enum format f, const struct file_plan_target *t, struct file_plan *out)
{
	*out = (struct file_plan){ .arena = arena_new(UINT64_MAX) };
	NEED(out->arena, "no memory for a plan");
	if (!rows[f].plan_files)
		return ERR(FORMAT_UNSUPPORTED, "checkpoints cannot be written in the format '%s'", rows[f].name);
	return rows[f].plan_files(t, out);
}

enum err format_put_metadata(enum format f, const struct sdict *sd, const struct dcp_meta_opts *opts, dcp_meta_sink sink, void *user)
{
	return rows[f].put_metadata(sd, opts, sink, user);
}
