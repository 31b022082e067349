/* fuzz_s3_answer.c: a server's answer, head and body, as the S3 client reads it: lines of the head up to an empty one, then XML. */
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "store/s3_answer.h"
#include "store/s3_xml.h"

int LLVMFuzzerTestOneInput(const unsigned char *p, size_t n);

static enum err element(void *user, const char *path, struct str text)
{
	size_t *seen = user;

	must(strlen(path) < S3_XML_PATH_MAX && text.n <= S3_XML_TEXT_MAX);
	char etag[S3_ETAG_MAX];
	if (s3_answer_etag(etag, text))
		must(strlen(etag) < sizeof etag);
	*seen += text.n;
	return OK;
}

int LLVMFuzzerTestOneInput(const unsigned char *p, size_t n)
{
	struct s3_answer a = { .status = n ? 200 + p[0] : 0 };
	struct str rest = { (const char *)p, n };
	enum s3_verdict verdict;
	size_t seen = 0;

	while (rest.n) {
		const char *end = memchr(rest.p, '\n', rest.n);
		size_t line = end ? (size_t)(end - rest.p) + 1 : rest.n;
		s3_answer_header(&a, (struct str){ rest.p, line });
		rest = (struct str){ rest.p + line, rest.n - line };
		if (line <= 2)
			break;
	}
	if (a.has_range)
		must(a.range_begin < a.range_end);
	(void)!s3_xml_read(rest, element, &seen);
	must(seen <= rest.n);
	s3_answer_words(&a, rest);
	must(s3_answer_error(&a, n & 1, &verdict) != OK);
	for (const char *t = err_last()->text; *t; t++)
		must((unsigned char)*t >= ' ');
	return 0;
}
