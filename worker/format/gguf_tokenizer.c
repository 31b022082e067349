/* gguf_tokenizer.c: a tokenizer of Hugging Face's as llama.cpp's metadata, as convert_hf_to_gguf.py writes it: SentencePiece's model file,
 * or the BPE of a tokenizer.json; special tokens, and the chat template, as gguf-py's SpecialVocab finds them. */
#include <stdio.h>
#include <string.h>

#include "base/jval.h"
#include "base/num.h"
#include "base/reader.h"
#include "format/gguf_impl.h"

enum { TOKENS_MAX = 1 << 22, TEXT_MAX = 64 };

enum token_type { TOKEN_NORMAL = 1, TOKEN_CONTROL = 3, TOKEN_USER, TOKEN_UNUSED, TOKEN_BYTE };

struct token {
	struct str text;               /* p NULL: none has this id */
	float score;
	enum token_type type;
};

struct tokenizer {
	struct gguf_head *h;
	const struct gguf_assets *a;
	const json_t *config;
	json_t *doc, *settings;        /* tokenizer.json, tokenizer_config.json */
	struct token *tokens;
	uint64_t count;
};

#define IN_TOKENIZER "tokenizer.json"
#define IN_SETTINGS "tokenizer_config.json"
#define IN_PIECES "tokenizer.model"

static FALLIBLE enum err bad(const char *file, const char *what)
{
	return err_at_file(ERR(FORMAT_GGUF, "%s", what), file, -1);
}

static struct str text_of(const json_t *v)
{
	const char *p = json_string_value(v);

	return p ? (struct str){ p, json_string_length(v) } : (struct str){ NULL, 0 };
}

static FALLIBLE enum err make_tokens(struct tokenizer *t, uint64_t least, const char *file)
{
	int64_t size = json_integer_value(json_object_get(t->config, "vocab_size"));

	t->count = size > 0 && (uint64_t)size > least ? (uint64_t)size : least;
	if (t->count > TOKENS_MAX)
		return bad(file, "more tokens than a vocabulary has");
	t->tokens = mem_zalloc(t->count, sizeof *t->tokens);
	return t->tokens ? OK : ERR(NO_MEMORY, "no memory for %ju tokens", (uintmax_t)t->count);
}

/* Tokens that steer a model although their files do not say so. */
static bool looks_special(struct str s)
{
	static const char *const words[] = { "<pad>", "<mask>", "<2mass>", "[@BOS@]" };

	for (size_t i = 0; i < sizeof words / sizeof *words; i++)
		if (str_is(s, words[i]))
			return true;
	return (str_starts(s, "<|") && str_ends(s, "|>")) || (str_starts(s, "<\xef\xbd\x9c") && str_ends(s, "\xef\xbd\x9c>")) ||
	       (str_starts(s, "<unused") && str_ends(s, ">"));
}

/* --------------------------------------------------------------------------------------------------- SentencePiece */

/* A field of a message in protocol buffers. */
struct field {
	uint64_t number, type, value;  /* value: of types 0 (varint) and 5 (32 bits) */
	struct reader in;              /* of type 2 (bytes) */
};

static uint64_t take_varint(struct reader *r)
{
	uint64_t v = 0;

	for (unsigned shift = 0; shift < 64; shift += 7) {
		uint8_t c = reader_u8(r);
		v |= (uint64_t)(c & 0x7F) << shift;
		if (c < 0x80)
			return v;
	}
	r->failed = true;
	return 0;
}

static bool take_field(struct reader *r, struct field *f)
{
	uint64_t tag = take_varint(r);

	*f = (struct field){ .number = tag >> 3, .type = tag & 7 };
	if (f->type == 0) {
		f->value = take_varint(r);
	} else if (f->type == 1) {
		f->value = reader_u64(r);
	} else if (f->type == 2) {
		uint64_t n = take_varint(r);
		const unsigned char *p = reader_take(r, n);
		f->in = reader_of(p, p ? n : 0);
	} else if (f->type == 5) {
		f->value = reader_u32(r);
	} else {
		return false;
	}
	return !r->failed;
}

/* A SentencePiece: 1 piece, 2 score, 3 type, which has the numbers of enum token_type. */
static bool take_piece(struct reader r, struct token *out)
{
	struct field f;

	*out = (struct token){ .text = { "", 0 }, .type = TOKEN_NORMAL };
	while (reader_left(&r)) {
		if (!take_field(&r, &f))
			return false;
		uint32_t bits = (uint32_t)f.value;
		if (f.number == 1 && f.type == 2)
			out->text = (struct str){ (const char *)f.in.p, f.in.n };
		else if (f.number == 2 && f.type == 5)
			memcpy(&out->score, &bits, sizeof out->score);
		else if (f.number == 3 && f.type == 0 && f.value >= TOKEN_NORMAL && f.value <= TOKEN_BYTE)
			out->type = (enum token_type)f.value;
	}
	return true;
}

/* The pieces of the ModelProto, its field 1; tokens NULL: only counts. */
static FALLIBLE enum err read_pieces(const struct tokenizer *t, struct token *tokens, uint64_t *count_out)
{
	struct reader r = reader_of(t->a->sentencepiece.p, t->a->sentencepiece.n);
	struct field f;
	uint64_t n = 0;

	while (reader_left(&r)) {
		if (!take_field(&r, &f))
			return bad(IN_PIECES, "not a model of SentencePiece's");
		if (f.number != 1 || f.type != 2)
			continue;
		if (tokens && !take_piece(f.in, &tokens[n]))
			return bad(IN_PIECES, "a damaged piece");
		n++;
	}
	*count_out = n;
	return n ? OK : bad(IN_PIECES, "a vocabulary without pieces");
}

static FALLIBLE enum err read_sentencepiece(struct tokenizer *t)
{
	const char *id;
	json_t *one;
	uint64_t n;

	TRY(read_pieces(t, NULL, &n));
	TRY(make_tokens(t, n, IN_PIECES));
	TRY(read_pieces(t, t->tokens, &n));
	for (; n < t->count; n++)
		t->tokens[n].score = -10000;
	json_object_foreach(json_object_get(t->settings, "added_tokens_decoder"), id, one) {
		struct str text = text_of(json_object_get(one, "content"));
		uint64_t at;
		if (!str_to_u64(str_of(id), &at) || !text.p)
			return bad(IN_SETTINGS, "an added token without a number or a text");
		if (at >= t->count)
			continue;
		bool special = json_is_true(json_object_get(one, "special")) || looks_special(text);
		t->tokens[at] = (struct token){ text, -1000, special ? TOKEN_CONTROL : TOKEN_USER };
	}
	gguf_kv_string(t->h, "tokenizer.ggml.model", STR("llama"));
	gguf_kv_string(t->h, "tokenizer.ggml.pre", STR("default"));
	return OK;
}

/* ------------------------------------------------------------------------------------------------------------ BPE */

static bool is_byte(struct str s)
{
	return s.n == 6 && memcmp(s.p, "<0x", 3) == 0 && s.p[5] == '>' && strspn(s.p + 3, "0123456789ABCDEFabcdef") >= 2;
}

static FALLIBLE enum err put_token(struct tokenizer *t, json_int_t id, struct token token)
{
	if (id < 0 || (uint64_t)id >= t->count || !token.text.p)
		return bad(IN_TOKENIZER, "a token without an id or a text");
	t->tokens[id] = token;
	return OK;
}

static FALLIBLE enum err read_vocabulary(struct tokenizer *t, const json_t *vocab, bool bytes)
{
	json_t *added = json_object_get(t->doc, "added_tokens"), *one;
	uint64_t least = 0;
	const char *key;
	size_t i, n;

	json_object_foreach((json_t *)(uintptr_t)vocab, key, one)
		least = num_max(least, json_integer_value(one) < TOKENS_MAX ? (uint64_t)json_integer_value(one) + 1 : TOKENS_MAX + 1);
	json_array_foreach(added, i, one) {
		json_int_t id = json_integer_value(json_object_get(one, "id"));
		least = num_max(least, id < TOKENS_MAX ? (uint64_t)id + 1 : TOKENS_MAX + 1);
	}
	TRY(make_tokens(t, least, IN_TOKENIZER));
	json_object_keylen_foreach((json_t *)(uintptr_t)vocab, key, n, one) {
		struct str text = { key, n };
		TRY(put_token(t, json_is_integer(one) ? json_integer_value(one) : -1,
			      (struct token){ text, bytes ? -1000 : 0, bytes && is_byte(text) ? TOKEN_BYTE : TOKEN_NORMAL }));
	}
	json_array_foreach(added, i, one) {
		const json_t *id = json_object_get(one, "id");
		struct str text = text_of(json_object_get(one, "content"));
		bool special = json_is_true(json_object_get(one, "special")) || (text.p && looks_special(text));
		TRY(put_token(t, json_is_integer(id) ? json_integer_value(id) : -1,
			      (struct token){ text, bytes ? -1000 : 0, special ? TOKEN_CONTROL : TOKEN_USER }));
	}
	return OK;
}

/* How llama.cpp is to cut text before BPE: its names stand for regular expressions. */
static const char *cut_name(const json_t *pre)
{
	static const struct { const char *regex, *name; } known[] = {
		{ "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"
		  "\\s+(?!\\S)|\\s+", "llama-bpe" },
		{ "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"
		  "\\s+(?!\\S)|\\s+", "qwen2" },
	};
	const json_t *parts = json_object_get(pre, "pretokenizers"), *one;
	const char *type = json_string_value(json_object_get(pre, "type"));
	size_t i;

	if (type && strcmp(type, "ByteLevel") == 0)
		return "gpt-2";
	json_array_foreach(parts, i, one) {
		const char *regex = json_string_value(json_object_get(json_object_get(one, "pattern"), "Regex"));
		for (size_t k = 0; regex && k < sizeof known / sizeof *known; k++)
			if (strcmp(regex, known[k].regex) == 0)
				return known[k].name;
	}
	return "default";
}

/* A part of a merge; spaces in it are as BPE on bytes writes them. */
static void put_merge_part(struct buf *b, struct str s)
{
	for (size_t i = 0; i < s.n; i++)
		if (s.p[i] == ' ')
			buf_puts(b, "\xc4\xa0");
		else
			buf_putc(b, (unsigned char)s.p[i]);
}

static FALLIBLE enum err put_merges(struct tokenizer *t, const json_t *merges)
{
	const json_t *one;
	size_t i;

	if (json_array_size(merges) == 0)
		return OK;
	gguf_kv_array(t->h, "tokenizer.ggml.merges", GGUF_STRING, json_array_size(merges));
	json_array_foreach(merges, i, one) {
		CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
		struct str whole = text_of(one), left = text_of(json_array_get(one, 0)), right = text_of(json_array_get(one, 1));
		if (!whole.p && (json_array_size(one) != 2 || !left.p || !right.p))
			return bad(IN_TOKENIZER, "a merge that is no pair of texts");
		if (whole.p) {
			gguf_put_string(&t->h->kv, whole);
			continue;
		}
		put_merge_part(&b, left);
		buf_putc(&b, ' ');
		put_merge_part(&b, right);
		TRY(buf_status(&b));
		gguf_put_string(&t->h->kv, (struct str){ (char *)b.p, b.len });
	}
	return OK;
}

static FALLIBLE enum err read_bpe(struct tokenizer *t, const json_t **merges_out)
{
	const json_t *model = json_object_get(t->doc, "model"), *vocab = json_object_get(model, "vocab");
	const char *type = json_string_value(json_object_get(model, "type"));
	bool bytes = json_is_true(json_object_get(model, "byte_fallback"));

	if (!type || strcmp(type, "BPE") != 0)
		return err_at_file(ERR(FORMAT_UNSUPPORTED, "a tokenizer of type \"%.40s\": known are BPE and a tokenizer.model",
				       type ? type : ""), IN_TOKENIZER, -1);
	if (!json_is_object(vocab))
		return bad(IN_TOKENIZER, "a tokenizer without a vocabulary");
	TRY(read_vocabulary(t, vocab, bytes));
	gguf_kv_string(t->h, "tokenizer.ggml.model", bytes ? STR("llama") : STR("gpt2"));
	gguf_kv_string(t->h, "tokenizer.ggml.pre", bytes ? STR("default") : str_of(cut_name(json_object_get(t->doc, "pre_tokenizer"))));
	*merges_out = bytes ? NULL : json_object_get(model, "merges");
	return OK;
}

/* --------------------------------------------------------------------------------------------------------- what all have */

/* llama.cpp looks for a user's tokens in text as it is: where files have SentencePiece's mark of a space, that is a space. */
static void put_user_token(struct buf *b, struct str s)
{
	const char *mark = "\xe2\x96\x81", *at;
	uint64_t marks = 0;

	for (at = s.p; (at = memmem(at, s.n - (size_t)(at - s.p), mark, 3)); at += 3)
		marks++;
	buf_le64(b, s.n - 2 * marks);
	while ((at = memmem(s.p, s.n, mark, 3))) {
		buf_put(b, s.p, (size_t)(at - s.p));
		buf_putc(b, ' ');
		s = (struct str){ at + 3, s.n - (size_t)(at + 3 - s.p) };
	}
	buf_put(b, s.p, s.n);
}

static void put_tokens(struct tokenizer *t, bool scored)
{
	char text[TEXT_MAX];

	gguf_kv_array(t->h, "tokenizer.ggml.tokens", GGUF_STRING, t->count);
	for (uint64_t i = 0; i < t->count; i++) {
		const struct token *k = &t->tokens[i];
		snprintf(text, sizeof text, "[PAD%ju]", (uintmax_t)i);
		if (k->type == TOKEN_USER)
			put_user_token(&t->h->kv, k->text);
		else
			gguf_put_string(&t->h->kv, k->text.p ? k->text : str_of(text));
	}
	if (scored)
		gguf_kv_array(t->h, "tokenizer.ggml.scores", GGUF_FLOAT32, t->count);
	for (uint64_t i = 0; i < t->count && scored; i++) {
		uint32_t bits;
		memcpy(&bits, &t->tokens[i].score, sizeof bits);
		buf_le32(&t->h->kv, bits);
	}
	gguf_kv_array(t->h, "tokenizer.ggml.token_type", GGUF_S32, t->count);
	for (uint64_t i = 0; i < t->count; i++)
		buf_le32(&t->h->kv, t->tokens[i].type ? t->tokens[i].type : TOKEN_UNUSED);
}

/* The id of an added token with the text that tokenizer_config.json gives, else what config.json says; -1: none. */
static json_int_t special_id(const struct tokenizer *t, const char *word)
{
	const json_t *entry, *one, *id = NULL;
	char key[TEXT_MAX];
	size_t i;

	snprintf(key, sizeof key, "%s_token", word);
	entry = json_object_get(t->settings, key);
	struct str text = text_of(json_is_object(entry) ? json_object_get(entry, "content") : entry);
	json_array_foreach(json_object_get(t->doc, "added_tokens"), i, one)
		if (text.p && !id && str_eq(text_of(json_object_get(one, "content")), text))
			id = json_object_get(one, "id");
	snprintf(key, sizeof key, "%s_token_id", word);
	if (!json_is_integer(id))
		id = json_object_get(t->config, key);
	json_int_t value = json_is_integer(id) ? json_integer_value(id) : -1;
	return value >= 0 && (uint64_t)value < t->count ? value : -1;
}

static void put_special(struct tokenizer *t)
{
	static const struct { const char *word, *key; } words[] = {
		{ "bos", "bos" }, { "eos", "eos" }, { "unk", "unknown" }, { "sep", "seperator" }, { "pad", "padding" }, { "mask", "mask" },
	};
	char key[TEXT_MAX];

	for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
		json_int_t id = special_id(t, words[i].word);
		snprintf(key, sizeof key, "tokenizer.ggml.%s_token_id", words[i].key);
		if (id >= 0)
			gguf_kv_u32(t->h, key, (uint32_t)id);
	}
	for (size_t i = 0; i < 2; i++) {
		snprintf(key, sizeof key, "add_%s_token", words[i].word);
		const json_t *add = json_object_get(t->settings, key);
		snprintf(key, sizeof key, "tokenizer.ggml.add_%s_token", words[i].word);
		if (json_is_boolean(add))
			gguf_kv_bool(t->h, key, json_is_true(add));
	}
}

static FALLIBLE enum err put_all(struct tokenizer *t)
{
	const json_t *merges = NULL;

	if (t->a->tokenizer_config.p)
		TRY(err_at_file(jval_parse(t->a->tokenizer_config, &t->settings), IN_SETTINGS, -1));
	if (t->a->tokenizer.p)
		TRY(err_at_file(jval_parse(t->a->tokenizer, &t->doc), IN_TOKENIZER, -1));
	TRY(t->a->sentencepiece.p ? read_sentencepiece(t) : read_bpe(t, &merges));
	put_tokens(t, !merges);
	TRY(put_merges(t, merges));
	put_special(t);
	struct str chat = text_of(json_object_get(t->settings, "chat_template"));
	if (t->a->chat_template.p || chat.p)
		gguf_kv_string(t->h, "tokenizer.chat_template", chat.p ? chat : t->a->chat_template);
	return OK;
}

enum err gguf_put_tokenizer(struct gguf_head *h, const struct gguf_assets *a, const json_t *config)
{
	struct tokenizer t = { .h = h, .a = a, .config = config };

	if (!a->tokenizer.p && !a->sentencepiece.p)
		return OK;
	enum err e = put_all(&t);
	mem_free(t.tokens);
	json_decref(t.doc);
	json_decref(t.settings);
	return e;
}
