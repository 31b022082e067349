// checkpoints.js: the list of all checkpoints, filtered as one types; two of them can be marked and compared.

import { $, h, pager, remember, rows } from "../widgets/dom.js";
import { bytes } from "../widgets/format.js";
import { button, checkpointHref, jobLink, state, table, when } from "../widgets/parts.js";
import { store } from "../store/store.js";

const PAGE = 100;
export const needs = ["checkpoints"];

const view = { page: 0, text: "" };
const marked = new Set();
let redraw = () => {};

const words = () => ({ text: $("checkpoints-text").value.trim(), page: view.page ? String(view.page + 1) : "" });

/** Filters the list as the address says. */
export function again(route) {
	$("checkpoints-text").value = route.filter.get("text") || "";
	view.text = $("checkpoints-text").value.trim().toLowerCase();
	view.page = Math.max(0, (Number.parseInt(route.filter.get("page"), 10) || 1) - 1);
	return true;
}

/** What is known of a checkpoint's bytes, since when, and which job found it out. */
export function verified(v) {
	if (!v) return "–";
	const count = v.damage_count > 1 ? ` · ${v.damage_count} places` : "";
	return [state(v.state), h("div", { class: "small" }, `${v.level}${count} · `, when(v.at), " · ", jobLink(v.job, "job"))];
}

function mark(key, on) {
	if (on) marked.add(key);
	else marked.delete(key);
	while (marked.size > 2) marked.delete(marked.values().next().value);
	redraw();
}

export function draw() {
	const line = (c) => `${c.storage}:${c.name} ${c.format} ${c.verified?.state || ""}`.toLowerCase();
	const found = store.checkpoints.filter((c) => line(c).includes(view.text));
	const page = Math.min(view.page, Math.max(0, Math.ceil(found.length / PAGE) - 1));
	rows($("checkpoints").tBodies[0], found.slice(page * PAGE, (page + 1) * PAGE), (c) => `${c.storage}:${c.name}`, (c) => {
		const key = `${c.storage}:${c.name}`, on = marked.has(key);
		return [
			h("th", { scope: "row", class: "name mono" }, h("a", { href: checkpointHref(key), "data-act": `tensors-${key}` }, key)),
			h("td", {}, c.format || "–"),
			h("td", { class: "num" }, bytes(c.bytes)),
			h("td", { class: "num" }, c.world_size ?? "–"),
			h("td", {}, when(c.modified_at)),
			h("td", {}, c.dcpd === true ? "dcpd" : c.dcpd === false ? "other" : "–"),
			h("td", {}, verified(c.verified)),
			h("td", {}, button(on ? "Marked" : "Compare", `mark-${key}`, () => mark(key, !marked.has(key)),
				{ class: "quiet-button", "aria-pressed": String(on),
				"aria-label": `Compare ${key}` })),
		];
	}, view.text ? "No checkpoint matches." : "No checkpoints yet.");
	pager($("checkpoints-pager"), { page, size: PAGE, total: found.length, more: false, word: "checkpoints", go: (to) => {
		view.page = to;
		remember("checkpoints", words());
		draw();
	} });
	const [a, b] = marked, link = $("checkpoints-compare");
	link.hidden = marked.size < 2;
	if (b) link.href = `#/compare?a=${encodeURIComponent(a)}&b=${encodeURIComponent(b)}`;
}

export function mount(root, route, page) {
	redraw = page.draw;
	root.append(h("h2", { id: "h-checkpoints", tabindex: "-1" }, "Checkpoints"),
		h("form", { class: "filters", role: "search", "aria-label": "Filter checkpoints", submit: (event) => event.preventDefault() },
			h("label", { for: "checkpoints-text" }, "Text"),
			h("input", { id: "checkpoints-text", type: "search", placeholder: "storage, name, format, damaged", spellcheck: "false",
				input: (event) => {
				view.text = event.target.value.trim().toLowerCase();
				view.page = 0;
				remember("checkpoints", words());
				redraw();
			} }),
			h("a", { id: "checkpoints-compare", class: "button", hidden: true, href: "#/compare" }, "Compare the two marked")),
		table("checkpoints", "Checkpoints table", ["Checkpoint", "Format", ["Size", "num"], ["World size", "num"], "Age", "Written by",
			"Verified", "Mark"]),
		h("div", { id: "checkpoints-pager", class: "pager" }));
	again(route);
}
