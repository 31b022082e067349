/* buf_text.c: bytes as text, by libsodium: hexadecimal and base64. Apart from buf.c, so that dcpctl needs no libsodium. */
#include <sodium.h>

#include "base/buf.h"

enum { VARIANT = sodium_base64_VARIANT_ORIGINAL, PIECE_BYTES = 3 << 10, PIECE_CHARS = 4 << 10 };

void buf_base64(struct buf *b, const void *p, size_t n)
{
	char piece[PIECE_CHARS + 1];

	for (size_t at = 0; at < n; at += PIECE_BYTES) {
		size_t some = n - at < PIECE_BYTES ? n - at : PIECE_BYTES;
		sodium_bin2base64(piece, sizeof piece, (const unsigned char *)p + at, some, VARIANT);
		buf_put(b, piece, (some + 2) / 3 * 4);
	}
}

enum err buf_unbase64(struct buf *b, struct str text)
{
	size_t pad = text.n < 2 ? 0 : (size_t)(text.p[text.n - 1] == '=') + (text.p[text.n - 2] == '=');
	size_t room = text.n / 4 * 3, n = 0;
	const char *end = text.p;
	unsigned char *at;

	if (text.n % 4 != 0)
		return ERR(VALIDATION_FAILED, "base64 of %zu characters is not padded", text.n);
	if (text.n == 0)
		return OK;
	TRY(buf_reserve(b, room - pad, &at));
	int bad = sodium_base642bin(at, room - pad, text.p, text.n, NULL, &n, &end, VARIANT);
	if (bad || end != text.p + text.n || n != room - pad)
		return ERR(VALIDATION_FAILED, "byte %zu is not base64", (size_t)(end - text.p));
	return OK;
}

enum err buf_unhex(struct str text, unsigned char *out, size_t bytes)
{
	size_t n = 0;

	for (size_t i = 0; i < text.n; i++)
		if (text.p[i] >= 'A' && text.p[i] <= 'F') /* libsodium takes them; nothing of ours writes them */
			return ERR(VALIDATION_FAILED, "hex digits in upper case");
	if (text.n != 2 * bytes || sodium_hex2bin(out, bytes, text.p, text.n, NULL, &n, NULL) != 0 || n != bytes)
		return ERR(VALIDATION_FAILED, "not %zu hex digits", 2 * bytes);
	return OK;
}
