// timeline.js: the checkpoints of a run, one column each: how large, what it shares with the step before, verified or damaged, which
// aliases lead to it, what holds it, and whether retention takes it next.

import { h, svg, tip } from "./dom.js";
import { ticks } from "./chart.js";
import { bytes } from "./format.js";

const WIDTH = 960, HEIGHT = 250, LEFT = 74, RIGHT = 14, TOP = 46, BOTTOM = 44;
const LABEL_WIDTH = 70;              // of a step's number, and of a flag

/** A flag over a column: its words, in the first lane where nothing stands. */
function flags(points, px) {
	const ends = [-Infinity, -Infinity];
	return points.flatMap((p, i) => (p.flags.length ? [{ x: px(i), words: p.flags.join(", ") }] : [])).map(({ x, words }) => {
		const width = Math.min(150, 12 + 6.4 * words.length), from = Math.max(LEFT, Math.min(WIDTH - RIGHT - width, x - width / 2));
		const lane = ends.findIndex((end) => end + 4 < from);
		if (lane < 0) return null;
		ends[lane] = from + width;
		const y = 4 + lane * 20;
		return svg("g", { class: "flag", "aria-hidden": "true" }, svg("line", { x1: x, x2: x, y1: y + 16, y2: HEIGHT - BOTTOM }),
			svg("rect", { x: from, y, width, height: 16, rx: 8 }),
			svg("text", { x: from + width / 2, y: y + 12, "text-anchor": "middle" }, words.length > 22
				? `${words.slice(0, 21)}…` : words));
	});
}

/** points, oldest first: [{label, bytes, shared, mark, flags: [words], goes, delta, words: [lines], href}]. */
export function timeline(label, points) {
	if (points.length === 0) return h("p", { class: "quiet" }, "No checkpoint yet.");
	const most = Math.max(...points.map((p) => p.bytes), 1), slot = (WIDTH - LEFT - RIGHT) / points.length, w = Math.max(1.5,
		Math.min(34, slot * 0.72));
	const px = (i) => LEFT + slot * (i + 0.5), py = (v) => HEIGHT - BOTTOM - (v / most) * (HEIGHT - TOP - BOTTOM),
		base = HEIGHT - BOTTOM;
	const every = Math.max(1, Math.ceil((points.length * LABEL_WIDTH) / (WIDTH - LEFT - RIGHT)));
	const columns = points.map((p, i) => {
		const own = Math.max(0, p.bytes - p.shared), x = px(i) - w / 2;
		return tip(svg("a", { href: p.href, "aria-label": p.words.join(", "), class: "step" },
			svg("rect", { class: "hit", x: px(i) - slot / 2, y: TOP, width: slot, height: base - TOP + 20 }),
			svg("rect", { class: `column shared ${p.mark}`, x, width: w, y: py(p.bytes), height: Math.max(0,
				py(own) - py(p.bytes)), rx: 1.5 }),
			svg("rect", { class: `column ${p.mark}`, x, width: w, y: py(own), height: Math.max(1.5, base - py(own)), rx: 1.5 }),
			p.delta && w > 9 ? svg("text", { class: "delta", x: px(i), y: base - 5, "text-anchor": "middle" }, "Δ") : null,
			svg("circle", { class: p.goes ? "fate-dot goes" : "fate-dot", cx: px(i), cy: base + 10, r: Math.min(5,
				Math.max(1.5, w / 2)) })), () => p.words);
	});
	const drawn = svg("svg", { class: "plot timeline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group", "aria-label": label },
		ticks(0, most, 3, true).map((v) => [svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: py(v), y2: py(v) }),
			svg("text", { class: "tick", x: LEFT - 8, y: py(v) + 4, "text-anchor": "end" }, bytes(v))]),
		flags(points, px), columns,
		points.map((p, i) => ((points.length - 1 - i) % every ? null : svg("text", { class: "tick", x: px(i), y: HEIGHT - 8,
			"text-anchor": "middle" }, p.label))));
	const legend = [["ok", "verified"], ["idle", "not verified"], ["bad", "damaged"], ["shared", "shared with the step before"],
		["goes", "retention takes it next"],
		["stays", "stays"]].filter(([mark]) => mark === "shared" ? points.some((p) => p.shared) : mark !== "bad"
			|| points.some((p) => p.mark === "bad"));
	const box = h("div", { class: "scroll-x", role: "region", "aria-label": label, tabindex: "0" }, drawn);
	requestAnimationFrame(() => { box.scrollLeft = box.scrollWidth; });      // on a phone the newest are in sight
	return [box,
		h("ul", { class: "legend" }, legend.map(([mark, words]) => h("li", { class: `t-${mark}` }, words)),
			points.some((p) => p.delta) ? h("li", { class: "plain" }, "Δ: a delta") : null)];
}
