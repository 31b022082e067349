// tensors.js: the tensors of one checkpoint, page by page, and statistics of them, which a job of the daemon reads when asked for.

import { get, post } from "./api.js";
import { $, h, pager, rows, sync, text } from "./dom.js";
import { number, shape } from "./format.js";
import { ENDED } from "./store.js";

const PAGE = 50;
const NONE = { ref: "", storage: "", name: "", prefix: "", page: 0, tokens: [""], items: null, next: "", why: "" };

let view = { ...NONE };
let stats = new Map();               // FQN → what the job said, of the checkpoint on show
let reading = new Set();             // FQNs
let shown = "";                      // whose histogram is open
let redraw = () => {};

const path = () => `/v1/checkpoints/${encodeURIComponent(view.storage)}/${encodeURIComponent(view.name)}/tensors`;

/** Fetches the page of the table; what another one was asked for meanwhile is dropped. */
async function load() {
	const mine = view, token = view.tokens[view.page];
	const query = new URLSearchParams({ page_size: String(PAGE) });
	if (token) query.set("page_token", token);
	if (view.prefix) query.set("prefix", view.prefix);
	try {
		const body = await get(`${path()}?${query}`);
		if (mine !== view) return;
		view.items = Array.isArray(body.tensors) ? body.tensors : [];
		view.next = body.next_page_token || "";
		view.why = "";
	} catch (error) {
		if (mine !== view) return;
		view.items = [];
		view.why = error.message;
	}
	redraw();
}

function go(change) {
	view = { ...view, items: null, ...change };
	load();
	redraw();
}

/** Opens the view of "STORAGE:NAME". */
export function openTensors(ref) {
	const at = ref.indexOf(":");
	if (ref !== view.ref) {
		stats = new Map();
		reading = new Set();
		shown = "";
	}
	$("tensors-prefix").value = ref === view.ref ? view.prefix : "";
	view = { ...NONE, ref, storage: ref.slice(0, at), name: ref.slice(at + 1), prefix: $("tensors-prefix").value, tokens: [""] };
	load();
}

/** Runs a job that reads these tensors, and keeps what it says. */
async function read(fqns) {
	const mine = view.ref, wanted = fqns.filter((fqn) => !stats.has(fqn) && !reading.has(fqn));
	if (wanted.length === 0) return;
	wanted.forEach((fqn) => reading.add(fqn));
	view.why = "";
	redraw();
	let why = "", count = 0;
	try {
		let job = await post("/v1/jobs", { kind: "stats", source: { storage: view.storage, name: view.name }, include: wanted });
		while (!ENDED.has(job.state)) job = await get(`/v1/jobs/${encodeURIComponent(job.id)}?wait=20s`);
		if (mine !== view.ref) return;
		for (const one of job.result?.statistics || []) {
			stats.set(one.fqn, one);
			count++;
		}
		why = job.state === "succeeded" ? "" : job.error?.detail || job.error?.title || `the job was ${job.state}`;
	} catch (error) {
		why = error.message;
	}
	if (mine !== view.ref) return;
	wanted.forEach((fqn) => reading.delete(fqn));
	view.why = why;
	text($("announce"), why ? `No statistics: ${why}` : `Statistics of ${count} tensor${count === 1 ? "" : "s"} are in the table`);
	redraw();
}

function show(fqn) {
	shown = shown === fqn ? "" : fqn;
	redraw();
}

function action(fqn) {
	const known = stats.has(fqn), open = shown === fqn;
	return h("button", { type: "button", "data-act": `stats-${fqn}`, disabled: reading.has(fqn),
		"aria-label": `${known ? "Histogram" : "Statistics"} of ${fqn}`, "aria-expanded": known ? String(open) : null,
		click: () => (stats.has(fqn) ? show(fqn) : read([fqn])) },
	reading.has(fqn) ? "Reading …" : known ? "Histogram" : "Statistics");
}

const complex = (v) => (Array.isArray(v) ? `${number(v[0])} ${v[1] < 0 ? "−" : "+"} ${number(Math.abs(v[1]))}i` : number(v));

/** Elements by magnitude, a row for each power of two: numbers for those who listen, bars for those who look. */
function histogram(s) {
	const most = Math.max(1, ...s.histogram.flatMap((b) => [b[1], b[2]]));
	const cell = (label, n) => h("td", { role: "cell", class: "num", "data-label": label }, number(n),
		h("progress", { max: most, value: n, "aria-hidden": "true" }));
	const heads = ["Magnitude", "Negative", "Positive"];
	return h("section", { class: "panel", "aria-label": `Histogram of ${s.fqn}` },
		h("h3", { class: "mono" }, s.fqn),
		s.histogram.length === 0 ? h("p", {}, "No element is finite and not zero.") : h("div", { class: "scroll", role: "region",
			"aria-label": "Histogram table", tabindex: "0" }, h("table", { role: "table" },
			h("thead", { role: "rowgroup" }, h("tr", { role: "row" },
				heads.map((word) => h("th", { scope: "col", role: "columnheader" }, word)))),
			h("tbody", { role: "rowgroup" }, s.histogram.map(([exponent, negative, positive]) => h("tr", { role: "row" },
				h("th", { scope: "row", role: "rowheader", class: "nowrap" }, `2^${exponent} to 2^${exponent + 1}`),
				cell(heads[1], negative), cell(heads[2], positive)))))));
}

export function drawTensors() {
	const items = view.items || [], todo = items.filter((t) => !stats.has(t.fqn)).map((t) => t.fqn);
	text($("h-tensors"), `Tensors of ${view.ref}`);
	rows($("tensors").tBodies[0], items, (t) => t.fqn, (t) => {
		const s = stats.get(t.fqn) || {};
		return [h("th", { scope: "row", class: "name mono" }, t.fqn), h("td", {}, t.dtype), h("td", { class: "nowrap" }, shape(t.shape)),
			...[s.min, s.max].map((v) => h("td", { class: "num" }, number(v))), h("td", { class: "num" }, complex(s.mean)),
			...[s.norm, s.zeros, s.nan, s.inf].map((v) => h("td", { class: "num" }, number(v))), h("td", {}, action(t.fqn))];
	}, view.why || (view.items ? "No tensor has such a name." : "Looking …"));
	pager($("tensors-pager"), { page: view.page, size: PAGE, total: view.page * PAGE + items.length, more: Boolean(view.next), word: "tensors",
		go: (page) => go({ page, tokens: page > view.page ? [...view.tokens.slice(0, page), view.next] : view.tokens }) });
	sync($("tensors-actions"), [
		h("button", { type: "button", "data-act": "stats-all", disabled: todo.length === 0 || reading.size > 0,
			click: () => read((view.items || []).map((t) => t.fqn)) }, "Statistics of all that are listed"),
		view.why && items.length ? h("span", { class: "error" }, view.why) : null]);
	sync($("tensors-histogram"), stats.has(shown) ? histogram(stats.get(shown)) : null);
}

export function initTensors(draw) {
	redraw = draw;
	const input = $("tensors-prefix");
	input.form.addEventListener("submit", (event) => event.preventDefault());
	input.addEventListener("input", () => go({ prefix: input.value.trim(), page: 0, tokens: [""] }));
}
