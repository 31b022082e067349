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

void problem_put(struct buf *b, const struct err_info *info, const char *instance, const char *job)
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

static const char *text_of(const json_t *problem, const char *key)
{
	const char *text = json_string_value(json_object_get(problem, key));

	return text ? text : "";
}

enum err problem_restore(const json_t *problem)
{
	enum err code = err_from_name(text_of(problem, "code"));
	const json_t *rank = json_object_get(problem, "rank"), *offset = json_object_get(problem, "offset");
	const char *fqn = text_of(problem, "fqn"), *file = text_of(problem, "file");

	err_record(code, 0, ERR_PLACE, "%s", text_of(problem, "detail"));
	if (json_is_integer(rank))
		(void)err_at_rank(code, json_integer_value(rank));
	if (fqn[0])
		(void)err_at_fqn(code, fqn, strlen(fqn));
	if (file[0])
		(void)err_at_file(code, file, json_is_integer(offset) ? json_integer_value(offset) : -1);
	(void)err_at_pointer(code, text_of(problem, "pointer"));
	return err_expected(code, text_of(problem, "expected"), text_of(problem, "actual"));
}
