// parts.js: the small pieces that all views are put together from: states, times, meters, panels, tables.

import { h } from "./dom.js";
import { ago, bytes, percent, place, ref, seconds } from "./format.js";

export const when = (stamp) => (stamp ? h("time", { datetime: stamp, title: stamp, "data-ago": true }, ago(stamp)) : "–");

/** "3 min 2 s", and it counts on. */
export const since = (stamp) => h("time", { datetime: stamp, title: stamp, "data-since": true },
	seconds(Math.max(0, Math.round((Date.now() - Date.parse(stamp)) / 1000))));
export const state = (word, words) => h("span", { class: "state", "data-state": word }, words || word);
export const chip = (words, mark, title) => h("span", { class: `chip ${mark || ""}`, title }, words);

export function bar(label, done, total) {
	const value = percent(done, total);
	return h("progress", { "aria-label": label, max: 100, value: value === null ? null : value.toFixed(1) }, "");
}

/** A bar of used space; `mark` bad or warn when it is nearly full. */
export function meter(label, used, total) {
	const value = percent(used, total) ?? 0;
	return h("progress", { class: value > 97 ? "bad" : value > 90 ? "warn" : null, max: 100, value: value.toFixed(1), "aria-label": label });
}

export const panel = (title, ...children) => h("section", { class: "panel", "aria-label": title }, h("h3", {}, title), ...children);
export const fact = (list) => h("dl", { class: "facts" }, list.filter(([, v]) => v !== undefined && v !== null && v !== "" && v !== false)
	.map(([k, v]) => [h("dt", {}, k), h("dd", {}, v === true ? "yes" : v)]));
export const stat = (label, value, ...more) => h("div", { class: "stat" }, h("span", { class: "stat-label" }, label), h("b", {}, value),
	...more);

export const jobHref = (id) => `#/jobs/${encodeURIComponent(id)}`;
export const checkpointHref = (words) => `#/checkpoints/${encodeURIComponent(words)}`;
export const jobLink = (id, words) => h("a", { class: words ? null : "mono", href: jobHref(id), "data-act": `open-${id}` }, words || id);

/** The name of a checkpoint or of a state dict, with a way to it. */
export function refLink(r) {
	const words = ref(r);
	if (!words) return null;
	return h("a", { class: "mono", href: words.startsWith("shm:") ? "#/state-dicts" : checkpointHref(words), "data-act": `ref-${words}` },
		words);
}

/** A whole table: heads are words, or [words, class]; rows of nodes come later through dom.rows. */
export function table(id, label, heads, ...more) {
	return h("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" },
		h("table", { id, role: "table" },
			...more,
			h("thead", { role: "rowgroup" }, h("tr", { role: "row" },
				heads.map((head) => [head].flat()).map(([words, mark]) => h("th", { scope: "col", role: "columnheader", class: mark }, words)))),
			h("tbody", { role: "rowgroup" })));
}

/** A table with its rows, for what does not change while one looks: cells are words or nodes, the first heads its row. */
export function plainTable(id, label, heads, list, ...more) {
	const node = table(id, label, heads, ...more), words = heads.map((head) => [head].flat());
	node.querySelector("tbody").append(...list.map((cells) => h("tr", { role: "row" }, cells.map((cell, i) => (i === 0
		? h("th", { scope: "row", role: "rowheader", class: words[i][1] }, cell)
		: h("td", { role: "cell", class: words[i][1], "data-label": words[i][0] }, cell))))));
	return node;
}

/** A line of words that names what is asked for: label and control. */
export const field = (id, label, control, hint) => h("div", { class: "field" }, h("label", { for: id }, label), control,
	hint ? h("span", { class: "hint", id: `${id}-hint` }, hint) : null);

export const button = (words, act, click, more = {}) => h("button", { type: "button", "data-act": act, click, ...more }, words);

export function verifiedChip(v) {
	if (!v) return chip("not verified", "idle");
	return chip(v.state, { verified: "ok", damaged: "bad" }[v.state] || "idle", `${v.level}, ${v.at}`);
}

/** What a progress object says: "25.0 MiB of 100 MiB · 5.0 MiB/s · 3 s left". */
export function numbers(progress) {
	const parts = [`${bytes(progress.bytes_done)} of ${bytes(progress.bytes_total)}`];
	if (progress.rate > 0) parts.push(`${bytes(progress.rate)}/s`);
	if (progress.eta_s > 0) parts.push(`${seconds(Math.ceil(progress.eta_s))} left`);
	return parts.join(" · ");
}

export const errorLine = (error) => {
	const where = place(error);
	return [h("div", { class: "error" }, h("strong", {}, error.code || "error"), ` ${error.detail || error.title || ""}`),
		where ? h("div", { class: "error mono" }, where) : null];
};
