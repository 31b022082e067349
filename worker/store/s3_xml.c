/* s3_xml.c: see s3_xml.h. expat parses; everything that makes small XML large is refused as it begins. */
#include "store/s3_xml.h"

#include <expat.h>
#include <limits.h>

#include "base/buf.h"
#include "base/mem.h"

struct reader {
	XML_Parser parser;
	s3_xml_fn fn;
	void *user;
	enum err failed;
	size_t depth;
	size_t path_end[S3_XML_DEPTH_MAX + 1];         /* length of the path at each depth */
	size_t text_end[S3_XML_DEPTH_MAX + 1];         /* where each open element's text begins in `text` */
	char path[S3_XML_PATH_MAX];
	struct buf text;
};

static void stop(struct reader *r, enum err e)
{
	if (!r->failed)
		r->failed = e;
	(void)XML_StopParser(r->parser, XML_FALSE);
}

static void on_doctype(void *user, const XML_Char *, const XML_Char *, const XML_Char *, int)
{
	stop(user, ERR(STORAGE_IO, "the answer's XML declares a document type, which no S3 server sends"));
}

static void on_start(void *user, const XML_Char *name, const XML_Char **)
{
	struct reader *r = user;
	const char *colon = strrchr(name, ':');
	size_t at = r->path_end[r->depth];

	if (r->failed)
		return;
	name = colon ? colon + 1 : name;
	size_t n = strlen(name);
	if (r->depth == S3_XML_DEPTH_MAX || n + 2 > sizeof r->path - at) {
		stop(r, ERR(STORAGE_IO, "the answer's XML has more than %d levels", S3_XML_DEPTH_MAX));
		return;
	}
	if (r->depth)
		r->path[at++] = '/';
	memcpy(r->path + at, name, n + 1);
	r->depth++;
	r->path_end[r->depth] = at + n;
	r->text_end[r->depth] = r->text.len;
}

static void on_text(void *user, const XML_Char *p, int n)
{
	struct reader *r = user;

	if (r->failed || r->depth == 0)
		return;
	buf_put(&r->text, p, (size_t)n);
	if (r->text.failed)
		stop(r, r->text.failed == ERR_NO_MEMORY ? ERR_NO_MEMORY :
							  ERR(STORAGE_IO, "the answer's XML has a text that is too long"));
}

static void on_end(void *user, const XML_Char *)
{
	struct reader *r = user;

	if (r->failed || r->depth == 0)
		return;
	size_t at = r->text_end[r->depth];
	enum err e = r->fn(r->user, r->path, (struct str){ r->text.p ? (const char *)r->text.p + at : "", r->text.len - at });
	r->text.len = at;
	r->depth--;
	r->path[r->path_end[r->depth]] = '\0';
	if (e)
		stop(r, e);
}

static void *grow(void *p, size_t n)
{
	return mem_grow(p, n, 1);
}

FALLIBLE enum err s3_xml_read(struct str xml, s3_xml_fn fn, void *user)
{
	static const XML_Memory_Handling_Suite memory = { mem_alloc, grow, mem_free };
	struct reader r = { .fn = fn, .user = user, .text = BUF_INIT(S3_XML_TEXT_MAX) };
	uint64_t failures = mem_failures();

	if (xml.n > INT_MAX)
		return ERR(LIMIT_EXCEEDED, "the answer's XML is too long");
	r.parser = XML_ParserCreate_MM("UTF-8", &memory, NULL);
	NEED(r.parser, "cannot read a storage's answer");
	XML_SetUserData(r.parser, &r);
	XML_SetElementHandler(r.parser, on_start, on_end);
	XML_SetCharacterDataHandler(r.parser, on_text);
	XML_SetStartDoctypeDeclHandler(r.parser, on_doctype);
	enum XML_Status status = XML_Parse(r.parser, xml.p, (int)xml.n, XML_TRUE);
	enum err e = r.failed;
	if (!e && status != XML_STATUS_OK && mem_failures() != failures)
		e = ERR(NO_MEMORY, "cannot read a storage's answer");
	else if (!e && status != XML_STATUS_OK)
		e = ERR(STORAGE_IO, "the answer's XML is damaged at line %lu: %s", XML_GetCurrentLineNumber(r.parser),
			XML_ErrorString(XML_GetErrorCode(r.parser)));
	XML_ParserFree(r.parser);
	buf_free(&r.text);
	return e;
}
