// chart.js: lines and bars over time as SVG. Our own, because the three forms that the page needs are smaller than any library's loader.

import { h, svg, tip } from "./dom.js";

const finite = (list) => list.filter((v) => Number.isFinite(v));

/** A small line of the last values, with the newest one in words: for cards. `values`: numbers or null, the oldest first. */
export function spark(label, values, words) {
	const known = finite(values), last = known.at(-1);
	const width = 120, height = 34, most = Math.max(...known, 0) || 1;
	const x = (i) => (values.length < 2 ? width / 2 : 3 + (i * (width - 6)) / (values.length - 1));
	const y = (v) => height - 3 - (v / most) * (height - 8);
	const points = values.map((v, i) => (Number.isFinite(v) ? [x(i), y(v)] : null)).filter(Boolean);
	const line = points.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
	const range = known.length ? `${words(Math.min(...known))} to ${words(Math.max(...known))}` : "";
	const drawing = known.length === 0 ? h("div", { class: "spark none" }, "no data yet")
		: svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, role: "img", preserveAspectRatio: "none",
			"aria-label": `${label} of the last ${known.length} saves: ${range}` },
		points.length > 1 ? svg("path", { class: "area",
			d: `${line}L${points.at(-1)[0].toFixed(1)} ${height}L${points[0][0].toFixed(1)} ${height}Z` }) : null,
		points.length > 1 ? svg("path", { class: "line", d: line }) : null,
		svg("circle", { class: "dot", cx: points.at(-1)[0].toFixed(1), cy: points.at(-1)[1].toFixed(1), r: 2.5 }));
	return h("div", { class: "trend" }, h("div", { class: "trend-head" }, h("span", {}, label),
		h("b", {}, known.length ? words(last) : "–")), drawing);
}

/** Round numbers that divide 0…most into at most `count` steps. */
export function ticks(low, most, count, binary) {
	const span = most - low || 1, base = binary ? 1024 ** Math.floor(Math.log(span) / Math.log(1024)) : 1;
	const raw = span / base / count, ten = 10 ** Math.floor(Math.log10(raw));
	const step = [1, 2, 5, 10].map((m) => m * ten).find((s) => s >= raw) * base;
	const out = [];
	for (let v = Math.ceil(low / step) * step; v <= most + step / 1e6; v += step) out.push(v);
	return out;
}

/**
 * A plot with axes. points: [{x, y, words?, href?, mark?}], ascending x; a point with words is told at the pointer and by Tab.
 * options: label, y (number → words), x (number → words), zero (begin at 0), bars, binary (ticks in powers of 1024), height.
 */
export function plot(points, options) {
	const { label, y: yWords, x: xWords, zero = true, bars = false, binary = false, height = 180 } = options;
	const known = points.filter((p) => Number.isFinite(p.x) && Number.isFinite(p.y));
	if (known.length === 0) return h("p", { class: "quiet" }, options.empty || "Nothing to plot yet.");
	const width = 560, left = 78, right = 12, top = 10, bottom = 24;
	const xs = known.map((p) => p.x), ys = known.map((p) => p.y);
	const low = zero ? 0 : Math.min(...ys), high = Math.max(...ys);
	const pad = zero ? 0 : (high - low || Math.abs(high) || 1) * 0.08, y0 = low - pad, y1 = (high === y0 ? y0 + 1 : high) + (zero ? 0 : pad);
	const x0 = Math.min(...xs), x1 = Math.max(...xs);
	const px = (v) => (x1 === x0 ? (left + width - right) / 2 : left + ((v - x0) / (x1 - x0)) * (width - left - right));
	const py = (v) => height - bottom - ((v - y0) / (y1 - y0)) * (height - top - bottom);
	const parts = ticks(y0, y1, 4, binary).map((v) => [
		svg("line", { class: "grid", x1: left, x2: width - right, y1: py(v), y2: py(v) }),
		svg("text", { class: "tick", x: left - 8, y: py(v) + 4, "text-anchor": "end" }, yWords(v))]);
	const ends = x1 === x0 ? [x0] : [x0, (x0 + x1) / 2, x1];
	parts.push(ends.map((v, i) => svg("text", { class: "tick", x: px(v), y: height - 6,
		"text-anchor": ends.length === 1 || i === 1 ? "middle" : i === 0 ? "start" : "end" }, xWords(v))));
	if (bars) {
		const w = Math.max(2, Math.min(26, (width - left - right) / known.length - 3));
		parts.push(known.map((p) => dot(svg("rect", { class: `column ${p.mark || ""}`,
			x: Math.max(left, Math.min(width - right - w, px(p.x) - w / 2)), width: w, y: py(p.y),
			height: Math.max(1, py(y0) - py(p.y)), rx: 2 }), p)));
	} else {
		const d = known.map((p, i) => `${i ? "L" : "M"}${px(p.x).toFixed(1)} ${py(p.y).toFixed(1)}`).join("");
		parts.push(svg("path", { class: "area", d: `${d}L${px(x1).toFixed(1)} ${py(y0)}L${px(x0).toFixed(1)} ${py(y0)}Z` }),
			svg("path", { class: "line", d }));
		if (known.length <= 80) parts.push(known.map((p) => dot(svg("circle", { class: `dot ${p.mark || ""}`, cx: px(p.x), cy: py(p.y), r: 4 }),
			p)));
	}
	return svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label }, parts);
}

function dot(node, point) {
	if (!point.words) return node;
	const words = [point.words].flat();
	node.setAttribute("role", "img");
	node.setAttribute("aria-label", words.join(", "));
	return tip(node, () => words);
}

/** One bar cut into parts: [{label, value, mark}]; the legend says each in words. */
export function shares(label, parts, words) {
	const total = parts.reduce((sum, p) => sum + p.value, 0) || 1;
	let at = 0;
	const bar = svg("svg", { class: "shares", viewBox: "0 0 100 4", preserveAspectRatio: "none", role: "img",
		"aria-label": `${label}: ${parts.filter((p) => p.value).map((p) => `${words(p.value)} ${p.label}`).join(", ") || "nothing"}` },
	parts.map((p) => {
		const w = (100 * p.value) / total, x = at;
		at += w;
		return w ? svg("rect", { class: p.mark, x: x.toFixed(3), width: w.toFixed(3), y: 0, height: 4 }) : null;
	}));
	return h("div", {}, bar, h("ul", { class: "legend" }, parts.map((p) => h("li", { class: p.mark }, h("b", {}, words(p.value)),
		` ${p.label}`))));
}
