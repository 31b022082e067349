// graph.js: where a checkpoint comes from and what was made of it: a graph in layers, parents on the left.

import { h, svg } from "./dom.js";
import { checkpointHref } from "./parts.js";

const WIDTH = 190, HEIGHT = 44, GAP_X = 70, GAP_Y = 14, PAD = 8;
const NODES_MAX = 120;

const keyOf = (node) => `${node.storage}:${node.name}`;

/** The layer of each node: one more than the deepest of its parents. Circles, which only a wrong record has, end the search. */
function layers(keys, edges) {
	const parents = new Map(keys.map((k) => [k, []]));
	for (const e of edges) if (parents.has(e.child) && parents.has(e.parent)) parents.get(e.child).push(e.parent);
	const depth = new Map(), open = new Set();
	const of = (key) => {
		if (depth.has(key)) return depth.get(key);
		if (open.has(key)) return 0;
		open.add(key);
		const d = parents.get(key).reduce((most, p) => Math.max(most, of(p) + 1), 0);
		open.delete(key);
		depth.set(key, d);
		return d;
	};
	keys.forEach(of);
	return depth;
}

const short = (words, most) => (words.length > most ? `…${words.slice(1 - most)}` : words);

/** lineage: {nodes, edges, truncated} as the API tells it; here: the key of the checkpoint on show. */
export function lineage(data, here) {
	const nodes = data.nodes.slice(0, NODES_MAX), keys = nodes.map(keyOf), depth = layers(keys, data.edges), column = [];
	const place = new Map();
	nodes.forEach((node) => {
		const d = depth.get(keyOf(node));
		column[d] = (column[d] || 0) + 1;
		place.set(keyOf(node), { x: PAD + d * (WIDTH + GAP_X), y: PAD + (column[d] - 1) * (HEIGHT + GAP_Y) });
	});
	const width = 2 * PAD + column.length * (WIDTH + GAP_X) - GAP_X, height = 2 * PAD + Math.max(...column, 1) * (HEIGHT + GAP_Y) - GAP_Y;
	const edges = data.edges.filter((e) => place.has(e.parent) && place.has(e.child)).map((e) => {
		const a = place.get(e.parent), b = place.get(e.child), x1 = a.x + WIDTH, y1 = a.y + HEIGHT / 2, x2 = b.x, y2 = b.y + HEIGHT / 2,
			mid = (x1 + x2) / 2;
		return [svg("path", { class: `edge ${e.state}`, d: `M${x1} ${y1}C${mid} ${y1} ${mid} ${y2} ${x2} ${y2}` }),
			svg("text", { class: "role", x: mid, y: (y1 + y2) / 2 - 4, "text-anchor": "middle" }, e.state === "same" ? e.role
				: `${e.role}, ${e.state}`)];
	});
	const boxes = nodes.map((node) => {
		const key = keyOf(node), at = place.get(key), last = node.name.slice(node.name.lastIndexOf("/") + 1);
		const drawn = [svg("rect", { x: at.x, y: at.y, width: WIDTH, height: HEIGHT, rx: 6 }),
			svg("text", { x: at.x + 10, y: at.y + 18 }, short(last, 26)),
			svg("text", { class: "role", x: at.x + 10, y: at.y + 34 },
				short(`${node.storage}${node.kind ? ` · ${node.kind}` : ""}${node.found ? "" : " · gone"}`, 30))];
		const mark = `node${key === here ? " here" : ""}${node.found ? "" : " gone"}`;
		return node.found ? svg("a", { class: mark, href: checkpointHref(key), "aria-label": key }, drawn)
			: svg("g", { class: mark, "aria-label": `${key}, gone`, role: "img" }, drawn);
	});
	return h("div", { class: "scroll", role: "region", "aria-label": "Graph of the lineage", tabindex: "0" },
		svg("svg", { class: "lineage", width, height, viewBox: `0 0 ${width} ${height}`, role: "group",
			"aria-label": `Lineage of ${here}: ${nodes.length} checkpoints` }, edges, boxes),
		data.truncated ? h("p", { class: "small" }, "There is more than is shown.") : null);
}
