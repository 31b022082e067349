/* problem.c: see problem.h. */
#include "api/problem.h"

enum { INSTANCE_MAX = 2048 };

static void put_text(struct buf *b, const char *key, const char *value)
{
	if (!value || !value[0])
		return;
	buf_printf(b, ",\"%s\":", key);
	buf_json_str(b, str_of(value));
}

void problem_put(struct buf *b, const struct err_info *info, const char *instance, const char *job,
		 const char *request)
{
	const char *code = err_code_name(info->code);

	buf_printf(b, "{\"type\":\"urn:dcpd:problem:%s\",\"title\":", code);
	buf_json_str(b, str_of(err_title(info->code)));
	buf_printf(b, ",\"status\":%d,\"code\":\"%s\",\"retryable\":%s", err_http_status(info->code), code,
		   err_retryable(info->code) ? "true" : "false");
	put_text(b, "detail", info->text);
	/* A URL that is refused for its length is not sent back. */
	if (instance && strlen(instance) <= INSTANCE_MAX)
		put_text(b, "instance", instance);
	put_text(b, "pointer", info->pointer);
	put_text(b, "job", job);
	put_text(b, "request_id", request);
	if (info->rank >= 0)
		buf_printf(b, ",\"rank\":%jd", (intmax_t)info->rank);
	put_text(b, "fqn", info->fqn);
	put_text(b, "file", info->file);
	if (info->offset >= 0)
		buf_printf(b, ",\"offset\":%jd", (intmax_t)info->offset);
	put_text(b, "expected", info->expected);
	put_text(b, "actual", info->actual);
	buf_putc(b, '}');
}
