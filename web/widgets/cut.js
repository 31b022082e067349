// cut.js: how a tensor is cut: its boxes over ranks as they lie in it, and its bytes as they lie in the files. The picture tells a box at
// the pointer or the focus; the same is in the table of chunks beside it.

import { h, svg, tip } from "./dom.js";
import { bytes, shape } from "./format.js";

const BOXES_MAX = 4096;
const FOCUSABLE_MAX = 64;            // more stops for Tab help nobody: the table has them all
const WIDTH = 640;
const COLOURS = 8;

export const colour = (rank) => `k${(rank ?? 0) % COLOURS}`;
const box = (c) => c.offsets.map((o, d) => `${o}:${o + c.sizes[d]}`).join(", ") || "all of it";

const words = (c) => [`rank ${c.rank}`, `box [${box(c)}]`, c.file ? `${c.file} at ${c.offset}` : null, c.length ? bytes(c.length)
	: null].filter(Boolean);

/** The two dims that say most: those that are cut, then the last ones. */
export function dimsOf(t) {
	const n = t.shape.length, cutIn = (d) => (t.chunks || []).some((c) => c.sizes[d] !== t.shape[d]);
	if (n <= 2) return [0, 1];
	const order = [...t.shape.keys()].sort((a, b) => Number(cutIn(b)) - Number(cutIn(a)) || b - a);
	return order.slice(0, 2).sort((a, b) => a - b);
}

function focusable(node, c, i) {
	const label = words(c).join(", ");
	node.setAttribute("role", "img");
	node.setAttribute("aria-label", label);
	if (i < FOCUSABLE_MAX) node.setAttribute("tabindex", "0");
	return tip(node, () => words(c));
}

/** The tensor as a rectangle, each box in its rank's colour. t: {fqn, shape, chunks}; dims: which ones go down and across. */
export function cut(t, dims = dimsOf(t)) {
	const n = t.shape.length, chunks = (t.chunks || []).slice(0, BOXES_MAX);
	const size = (d) => (n === 0 ? 1 : n === 1 ? (d === 1 ? t.shape[0] : 1) : t.shape[dims[d]]);
	const rows = Math.max(1, size(0)), columns = Math.max(1, size(1));
	const height = n < 2 ? 56 : Math.min(330, Math.max(70, (WIDTH * rows) / columns));
	const width = n < 2 ? WIDTH : Math.min(WIDTH, Math.max(120, (height * columns) / rows)), top = 16, left = 4;
	const side = (c, d, total, span) => {
		if (n === 0 || (n === 1 && d === 0)) return [0, span];
		const k = n === 1 ? 0 : dims[d];
		return [(c.offsets[k] / total) * span, (c.sizes[k] / total) * span];
	};
	const places = new Map();
	const parts = chunks.map((c, i) => {
		const [y, hh] = side(c, 0, rows, height), [x, w] = side(c, 1, columns, width), key = `${x},${y},${w},${hh}`, behind = places.get(key)
			|| 0;
		places.set(key, behind + 1);
		const inset = Math.min(behind * 4, w / 3, hh / 3);
		const rect = focusable(svg("rect", { class: colour(c.rank), x: (left + x + inset).toFixed(2), y: (top + y + inset).toFixed(2),
			width: Math.max(.6, w - inset).toFixed(2),
			height: Math.max(.6, hh - inset).toFixed(2) }), c, i);
		const label = w > 52 && hh > 18 && !behind ? svg("text", { x: (left + x + w / 2).toFixed(1), y: (top + y + hh / 2 + 4).toFixed(1),
			"text-anchor": "middle", "aria-hidden": "true" }, `rank ${c.rank}`) : null;
		return [rect, label];
	});
	const ranks = new Set(chunks.map((c) => c.rank)).size, stacked = [...places.values()].some((v) => v > 1);
	const axes = n < 2 ? null : [svg("text", { class: "axis", x: left, y: 11, "aria-hidden": "true" },
		`dim ${dims[1]}: ${columns} →   dim ${dims[0]}: ${rows} ↓`)];
	return h("div", {}, svg("svg", { class: "cut", viewBox: `0 0 ${WIDTH + 8} ${height + top + 6}`, role: "group",
		"aria-label": `${t.fqn} ${shape(t.shape)} is cut into ${chunks.length} boxes over ${ranks} ranks` },
		parts.length ? parts : svg("rect", { class: "hole", x: left, y: top, width, height }), axes),
	h("p", { class: "small" }, `${chunks.length} box${chunks.length === 1 ? "" : "es"} over ${ranks} rank${ranks === 1 ? "" : "s"}`,
		(t.chunk_count ?? 0) > chunks.length ? `, the first of ${t.chunk_count}` : "", stacked
			? "; boxes that lie behind each other in these two dims are drawn inset" : ""));
}

/** Where the tensor's bytes lie: a strip for each file, as long as it is. sizes: file → bytes. */
export function files(t, sizes) {
	const list = new Map();
	for (const c of (t.chunks || []).slice(0, BOXES_MAX)) if (c.file) list.set(c.file, [...(list.get(c.file) || []), c]);
	const most = Math.max(1, ...[...list.keys()].map((f) => sizes.get(f) || 0),
		...(t.chunks || []).map((c) => (c.offset || 0) + (c.length || 0)));
	let i = 0;
	return h("ul", { class: "file-strips" }, [...list].slice(0, 64).map(([file, chunks]) => {
		const size = sizes.get(file) || most;
		return h("li", {}, h("span", { class: "mono" }, file), svg("svg", { class: "cut strip", viewBox: "0 0 640 18",
			preserveAspectRatio: "none", role: "group", "aria-label": `${file}, ${bytes(size)}` },
			svg("rect", { class: "file-space", x: 0, y: 0, width: (640 * size) / most, height: 18 }),
			chunks.map((c) => focusable(svg("rect", { class: colour(c.rank), x: ((640 * c.offset) / most).toFixed(2), y: 1,
				width: Math.max(2, (640 * c.length) / most).toFixed(2), height: 16 }), c, i++))),
		h("span", { class: "small" }, bytes(size)));
	}));
}

/** The boxes in words: rank, box, file, offset, bytes. */
export const chunkRows = (t, most = 200) => (t.chunks || []).slice(0, most).map((c) => [String(c.rank), `[${box(c)}]`, c.file || "–",
	c.offset ?? "–", c.length ? bytes(c.length) : "–"]);
