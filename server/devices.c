/* devices.c: see devices.h. */
#include "server/devices.h"

#include <stdio.h>

#include "base/jtext.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/worker.h"

struct devices {
	struct workers *workers;
	struct worker *worker;              /* NULL: no probe is under way */
	json_t *backends, *found;
	char reason[ERR_TEXT_MAX + 64];     /* while there is no answer */
};

static void set_reason(struct devices *d, const char *what, const char *text)
{
	snprintf(d->reason, sizeof d->reason, "%s%s", what, text);
}

void devices_note(struct devices *d, const json_t *hello)
{
	json_t *backends = json_object_get(hello, "backends"), *found = json_object_get(hello, "devices");

	if (!json_is_object(json_object_get(backends, "nccl")) || !json_is_array(found)) {
		set_reason(d, "", "the probe said nothing of GPUs");
		return;
	}
	json_decref(d->backends);
	json_decref(d->found);
	d->backends = json_incref(backends);
	d->found = json_incref(found);
	const char *why = json_string_value(json_object_get(json_object_get(backends, "nccl"), "reason"));
	char count[24];
	snprintf(count, sizeof count, "%zu", json_array_size(found));
	log_info("devices", "gpus", count, "nccl", why ? why : "available", NULL);
}

static void on_ready(struct worker *w, enum err e, const json_t *hello)
{
	struct devices *d = w->owner;

	devices_note(d, hello);
	if (e)
		set_reason(d, "the probe failed: ", err_last()->text);
	d->worker = NULL;
	worker_disown(w); /* it has said all there is */
}

static void on_frame(struct worker *w, const struct frame *f, const json_t *)
{
	worker_kill(w, ERR(PROTOCOL, "a probe sent a message of type %u", f->type));
}

static void on_ended(struct worker *w, enum err)
{
	struct devices *d = w->owner;

	set_reason(d, "the probe failed: ", err_last()->text);
	d->worker = NULL;
}

void devices_probe(struct devices *d)
{
	static const struct worker_ops ops = { .ready = on_ready, .frame = on_frame, .ended = on_ended };
	struct worker_spec spec = { .role = "probe", .count = 1, .ops = &ops, .owner = d };

	if (d->worker)
		return;
	if (worker_start(d->workers, &spec, &d->worker) != OK) {
		set_reason(d, "the probe could not be started: ", err_last()->text);
		log_err("cannot look for devices", NULL);
	}
}

FALLIBLE enum err devices_new(struct workers *workers, struct devices **out)
{
	*out = mem_zalloc(1, sizeof **out);
	NEED(*out, "cannot look for devices");
	(*out)->workers = workers;
	set_reason(*out, "", "not yet known: the probe has not answered");
	devices_probe(*out);
	return OK;
}

static FALLIBLE enum err put_json(struct buf *out, const json_t *value)
{
	CLEANUP(mem_free_ptr) char *text = jtext_of(value);

	NEED(text, "cannot show devices");
	buf_puts(out, text);
	return OK;
}

static void put_unknown(struct buf *out, const char *name, const char *reason)
{
	buf_printf(out, ",\"%s\":{\"available\":false,\"reason\":", name);
	buf_json_str(out, str_of(reason));
	buf_putc(out, '}');
}

FALLIBLE enum err devices_put(const struct devices *d, struct buf *out)
{
	if (!d->backends) {
		buf_puts(out, "\"backends\":{\"shm\":{\"available\":true},\"tcp\":{\"available\":true}");
		put_unknown(out, "cuda", d->reason);
		put_unknown(out, "nccl", d->reason);
		buf_puts(out, "},\"devices\":[]");
		return buf_status(out);
	}
	buf_puts(out, "\"backends\":");
	TRY(put_json(out, d->backends));
	buf_puts(out, ",\"devices\":");
	TRY(put_json(out, d->found));
	return buf_status(out);
}

const char *devices_missing(const struct devices *d, const char *backend)
{
	const json_t *b = json_object_get(d->backends, backend);
	const char *reason = json_string_value(json_object_get(b, "reason"));

	if (!d->backends)
		return d->reason;
	if (json_is_true(json_object_get(b, "available")))
		return NULL;
	return reason ? reason : "the probe did not say why";
}

bool devices_pending(const struct devices *d)
{
	return !d->backends && d->worker;
}

const json_t *devices_found(const struct devices *d)
{
	return d->found;
}

bool devices_has(const struct devices *d, const char *uuid)
{
	const json_t *one;
	size_t i;

	json_array_foreach(d->found, i, one) {
		const char *its = json_string_value(json_object_get(one, "uuid"));
		if (its && strcmp(its, uuid) == 0)
			return true;
	}
	return false;
}

const char *devices_only(const struct devices *d)
{
	return json_array_size(d->found) == 1 ? json_string_value(json_object_get(json_array_get(d->found, 0), "uuid")) : NULL;
}

const char *devices_version(const struct devices *d, const char *backend)
{
	return json_string_value(json_object_get(json_object_get(d->backends, backend), "version"));
}

void devices_free(struct devices *d)
{
	if (!d)
		return;
	if (d->worker)
		worker_disown(d->worker);
	json_decref(d->backends);
	json_decref(d->found);
	mem_free(d);
}
