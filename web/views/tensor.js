// tensor.js: one tensor: how it is cut, what its numbers are like, and a part of them as colours.

import { bytesOf, checkpointPath, get, post } from "../api/api.js";
import { $, h, sync, text } from "../widgets/dom.js";
import { bytes, number, seconds, shape } from "../widgets/format.js";
import { button, fact, plainTable } from "../widgets/parts.js";
import { chunkRows, cut, dimsOf, files } from "../widgets/cut.js";
import { plot } from "../widgets/chart.js";
import { heat, numbersOf } from "../widgets/heat.js";
import { ENDED } from "../store/store.js";

const SIDE = 96;                     // of a slice that is drawn when nothing else was asked for

const stats = new Map();             // "REF FQN" → statistics, or "reading", or {problem}
let slice = { key: "", words: "", node: null, problem: "" };
let redraw = () => {};
export function onTensor(draw) {
	redraw = draw;
}

const complex = (v) => (Array.isArray(v) ? `${number(v[0])} ${v[1] < 0 ? "−" : "+"} ${number(Math.abs(v[1]))}i` : number(v));
const keyOf = (ref, t) => `${ref.storage}:${ref.name} ${t.fqn}`;

/** Runs a job that reads the tensor, and keeps what it says. */
async function read(ref, t) {
	const key = keyOf(ref, t);
	stats.set(key, "reading");
	redraw();
	try {
		let job = await post("/v1/jobs", { kind: "stats", source: ref, include: [t.fqn] });
		while (!ENDED.has(job.state)) job = await get(`/v1/jobs/${encodeURIComponent(job.id)}?wait=20s`);
		const one = (job.result?.statistics || []).find((s) => s.fqn === t.fqn);
		stats.set(key, one || { problem: job.error?.detail || job.error?.title || `the job was ${job.state}` });
	} catch (error) {
		stats.set(key, { problem: error.message });
	}
	const got = stats.get(key);
	text($("announce"), got.problem ? `No statistics: ${got.problem}` : `Statistics of ${t.fqn} are shown`);
	redraw();
}

/** Elements by magnitude, a column for each power of two, below and above zero. */
function histogram(s) {
	if (s.histogram.length === 0) return h("p", {}, "No element is finite and not zero.");
	const points = s.histogram.map(([e, negative, positive]) => ({ x: e, y: negative + positive,
		words: [`2^${e} to 2^${e + 1}`, `${number(negative)} negative`, `${number(positive)} positive`] }));
	return [plot(points, { label: `Elements of ${s.fqn} by magnitude`, y: number, x: (v) => `2^${Math.round(v)}`, bars: true, height: 150 }),
		h("details", { id: "tensor-histogram-table" }, h("summary", {}, "As a table"),
			plainTable("tensors-histogram", `Histogram of ${s.fqn}`, ["Magnitude", ["Negative", "num"], ["Positive", "num"]],
			s.histogram.map(([e, a, b]) => [`2^${e} to 2^${e + 1}`, number(a), number(b)])))];
}

function statistics(ref, t) {
	const s = stats.get(keyOf(ref, t));
	const again = button(s === "reading" ? "Reading …" : s ? "Read again" : "Statistics", `stats-${t.fqn}`, () => read(ref, t),
		{ disabled: s === "reading", "aria-label": `Statistics of ${t.fqn}` });
	if (!s || s === "reading") return [h("p", { class: "quiet" },
		"Minimum, maximum, mean, norm, NaN, Inf, zeros and a histogram: a job reads the whole tensor for them."), again];
	if (s.problem) return [h("p", { class: "error" }, s.problem), again];
	return [fact([["Elements", number(s.count)], ["Min", number(s.min)], ["Max", number(s.max)], ["Mean", complex(s.mean)],
		["Norm", number(s.norm)],
		["Zeros", number(s.zeros)], ["NaN", s.nan ? h("strong", { class: "error" }, number(s.nan)) : "0"],
			["Inf", s.inf ? h("strong", { class: "error" }, number(s.inf)) : "0"]]), histogram(s)];
}

/** "0, 0:96, 0:96": what is drawn of a tensor unless somebody asks for more. */
const firstSlice = (t) => t.shape.map((n, d) => (d < t.shape.length - 2 ? "0:1" : `0:${Math.min(n, SIDE)}`)).join(",");

async function look(ref, t, words) {
	const key = keyOf(ref, t);
	slice = { key, words, node: null, problem: "", reading: true };
	redraw();
	const mine = slice, began = performance.now();
	try {
		const path = checkpointPath(ref, `/tensors/${encodeURIComponent(t.fqn)}`);
		const got = await bytesOf(`${path}?slice=${encodeURIComponent(words)}&format=raw`);
		const values = numbersOf(got.bytes, got.dtype || t.dtype);
		if (!values) throw new Error(`${t.dtype} has no plain numbers to draw; download the slice instead`);
		if (values.length === 0) throw new Error("the slice is empty");
		if (values.length > 1 << 20) throw new Error("a slice of more than a million elements is not drawn");
		const columns = got.shape.at(-1) || values.length, rows = Math.max(1, Math.round(values.length / columns));
		const starts = words.split(",").map((part) => Number.parseInt(part, 10) || 0), at = [starts.at(-2) ?? 0, starts.at(-1) ?? 0];
		mine.node = heat(values, rows, columns, at, `${t.fqn}[${words}]`);
		mine.took = `${bytes(got.bytes.byteLength)} in ${seconds((performance.now() - began) / 1000)}`;
	} catch (error) {
		mine.problem = error.message;
	}
	mine.reading = false;
	if (mine === slice) redraw();
}

function heatPart(ref, t) {
	const mine = slice.key === keyOf(ref, t) ? slice : null, words = mine?.words || firstSlice(t);
	const path = `${checkpointPath(ref, `/tensors/${encodeURIComponent(t.fqn)}`)}?slice=${encodeURIComponent(words)}&format=npy`;
	return [h("form", { class: "filters", "aria-label": "Slice", submit: (event) => {
		event.preventDefault();
		look(ref, t, $("slice-words").value.trim() || firstSlice(t));
	} }, h("label", { for: "slice-words" }, "Slice"), h("input", { id: "slice-words", value: words, spellcheck: "false", size: "18",
		class: "mono" }),
	h("button", { type: "submit", "data-act": "slice" }, mine?.reading ? "Reading …" : "Draw it")),
	mine?.problem ? h("p", { class: "error" }, mine.problem) : null,
	h("p", { class: "small" }, mine?.took ? `${mine.took}. ` : "", "In a shell: ",
		h("code", {}, `curl -H "Authorization: Bearer $DCPD_TOKEN" '${location.origin}${path}' -o slice.npy`))];
}

/** Fills the panel with one tensor or value. node keeps its parts between draws, so that typing is not disturbed. */
export function drawTensor(node, ref, t, sizes) {
	if (!t) {
		sync(node, h("p", { class: "quiet" }, "Choose a tensor to see how it is cut and what is in it."));
		node.dataset.key = "";
		return;
	}
	if (t.is_value) {
		node.dataset.key = "";
		sync(node, [h("h3", { class: "mono" }, t.fqn), fact([["Value", t.opaque ? `a ${t.opaque}, not decoded` : JSON.stringify(t.value)],
			["File", t.file ? `${t.file} at ${t.offset}` : null]])]);
		return;
	}
	const key = keyOf(ref, t);
	if (node.dataset.key !== key) {
		node.dataset.key = key;
		const dims = dimsOf(t);
		const choose = t.shape.length > 2 ? h("p", { class: "small" }, `Shown are dims ${dims.join(" and ")} of ${t.shape.length}.`) : null;
		node.replaceChildren(h("h3", { class: "mono", id: "tensor-name" }, h("bdi", {}, t.fqn)),
			h("p", { class: "small" }, `${t.dtype} ${shape(t.shape)} · ${bytes(t.bytes)} · ${t.chunk_count ?? (t.chunks || []).length} chunks`),
			h("div", { class: "columns" },
				h("section", { "aria-label": "Cut over ranks" }, h("h4", {}, "Over ranks"), cut(t, dims), choose),
				h("section", { "aria-label": "Bytes in files" }, h("h4", {}, "In files"), files(t, sizes))),
			h("details", { id: "tensor-chunks" }, h("summary", {}, "Chunks as a table"),
				plainTable("chunks", "Chunks", [["Rank", "num"], "Box", "File", ["Offset", "num"], ["Bytes", "num"]], chunkRows(t))),
			h("div", { class: "columns" }, h("section", { "aria-label": "Statistics" }, h("h4", {}, "Numbers"), h("div", { id: "tensor-stats" })),
				h("section", { "aria-label": "Heat map" }, h("h4", {}, "A slice"), h("div", { id: "tensor-slice" }),
					h("div", { id: "tensor-heat" }))));
	}
	sync($("tensor-stats"), statistics(ref, t));
	sync($("tensor-slice"), t.shape.length && t.bytes ? heatPart(ref, t) : []);
	const drawn = slice.key === key ? slice.node : null;
	if ($("tensor-heat").firstChild !== drawn) $("tensor-heat").replaceChildren(...(drawn ? [drawn] : []));
}
