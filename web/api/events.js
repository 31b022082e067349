// events.js: the daemon's event stream (server-sent events) read with fetch.
//
// EventSource cannot send an Authorization header, and a token in the URL would end in logs. So the stream is parsed here, with
// what EventSource would do: Last-Event-ID on reconnect, `retry:`, growing pauses. A stream that is silent for three heartbeats
// counts as gone: a half-open TCP connection says nothing by itself.

import { Problem, headers } from "./api.js";

const SILENCE_MS = 45000;
const PAUSE_MAX_MS = 15000;
const STEADY_MS = 5000;      // a stream that was open for less counts as another failure

/** Turns chunks of text into events; bytes of one event may come in any number of chunks. */
export class Parser {
	constructor(emit, retry) {
		this.emit = emit;
		this.retry = retry;
		this.rest = "";
		this.clear();
	}

	clear() {
		this.type = "";
		this.data = [];
		this.id = null;
	}

	push(chunk) {
		const lines = (this.rest + chunk).split(/\r\n|\n|\r(?!$)/);
		this.rest = lines.pop();
		lines.forEach((line) => this.line(line));
	}

	line(line) {
		if (line === "") {
			if (this.data.length) this.emit({ type: this.type || "message", data: this.data.join("\n"), id: this.id });
			this.clear();
			return;
		}
		const colon = line.indexOf(":");
		if (colon === 0) return;
		const field = colon < 0 ? line : line.slice(0, colon);
		const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
		if (field === "event") this.type = value;
		else if (field === "data") this.data.push(value);
		else if (field === "id" && !value.includes("\0")) this.id = value;
		else if (field === "retry" && /^\d+$/.test(value)) this.retry(Number(value));
	}
}

/**
 * Stays connected to `path` until stop(). on.open(resumed), on.event({type, data, id}), on.down(words, next_try_ms),
 * on.refused(problem) for 401 and 403, after which it gives up.
 */
export class Stream {
	constructor(path, on) {
		this.path = path;
		this.on = on;
		this.last = "";
		this.base = 500;
		this.failures = 0;
		this.stopped = true;
	}

	start() {
		this.stopped = false;
		this.loop();
	}

	stop() {
		this.stopped = true;
		this.abort?.abort();
		this.wake?.();
	}

	/** Tries now instead of at the end of the pause. */
	hurry() {
		this.wake?.();
	}

	async loop() {
		while (!this.stopped) {
			let words = "the stream ended";
			this.opened = 0;
			try {
				await this.read();
			} catch (error) {
				if (this.stopped) return;
				if (error instanceof Problem && (error.status === 401 || error.status === 403)) {
					this.stopped = true;
					this.on.refused(error);
					return;
				}
				words = error instanceof Problem ? error.message : "no answer";
			}
			if (this.stopped) return;
			if (this.opened && Date.now() - this.opened > STEADY_MS) this.failures = 0;
			const grown = Math.min(PAUSE_MAX_MS, this.base * 2 ** this.failures++);
			const pause = grown * (0.75 + Math.random() / 2);
			this.on.down(words, pause);
			await new Promise((resolve) => {
				this.wake = resolve;
				setTimeout(resolve, pause);
			});
		}
	}

	async read() {
		this.abort = new AbortController();
		let timer;
		const alive = () => {
			clearTimeout(timer);
			timer = setTimeout(() => this.abort.abort(), SILENCE_MS);
		};
		alive();
		try {
			const extra = { Accept: "text/event-stream" };
			if (this.last) extra["Last-Event-ID"] = this.last;
			const response = await fetch(this.path, { headers: headers(extra), cache: "no-store", signal: this.abort.signal });
			if (!response.ok) throw new Problem(response.status, await response.json().catch(() => ({})));
			this.opened = Date.now();
			this.on.open(this.last !== "");
			const parser = new Parser((event) => {
				if (event.id !== null) this.last = event.id;
				this.on.event(event);
			}, (ms) => { this.base = Math.min(Math.max(ms, 100), PAUSE_MAX_MS); });
			const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
			for (;;) {
				const { done, value } = await reader.read();
				if (done) return;
				alive();
				parser.push(value);
			}
		} finally {
			clearTimeout(timer);
		}
	}
}
