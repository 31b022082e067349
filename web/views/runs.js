// runs.js: all runs of all storages in a table, with the verdict of the overview.

import { $, h, rows } from "../widgets/dom.js";
import { bytes } from "../widgets/format.js";
import { state, table, when } from "../widgets/parts.js";
import { lastPart, runHref, verdictOf } from "../store/health.js";
import { store } from "../store/store.js";

export const needs = ["policies"];
const MARKS = { safe: ["ok", "safe"], idle: ["ok", "safe, idle"], late: ["warn", "look at it"], bad: ["bad", "at risk"],
	unknown: ["idle", "–"] };
let filter = "";
let redraw = () => {};

export function draw() {
	const found = store.runs.filter((r) => `${r.storage}:${r.run}`.toLowerCase().includes(filter));
	rows($("runs").tBodies[0], found, (r) => `${r.storage}:${r.run}`, (r) => {
		const v = verdictOf(store, r), [mark, words] = MARKS[v.state];
		return [
			h("th", { scope: "row", class: "name" }, h("a", { href: runHref(r), "data-act": `run-${r.storage}:${r.run}` },
				`${r.storage}:${r.run}`)),
			h("td", {}, state(mark, words), v.state === "bad" || v.state === "late" ? h("div", { class: "small" }, v.words) : null),
			h("td", { class: "num" }, String(r.checkpoints)),
			h("td", { class: "num" }, bytes(r.bytes)),
			h("td", {}, r.latest ? lastPart(r.latest) : "–", r.step !== null && r.step !== undefined
				? h("div", { class: "small" }, `step ${r.step}`) : null),
			h("td", {}, when(r.modified_at)),
			h("td", {}, r.holds ? String(r.holds) : "–"),
		];
	}, filter ? "No run matches." : "No run has saved yet.");
}

export function mount(root, route, page) {
	redraw = page.draw;
	filter = "";
	root.append(h("h2", { id: "h-runs", tabindex: "-1" }, "Runs"),
		h("form", { class: "filters", role: "search", "aria-label": "Filter runs", submit: (event) => event.preventDefault() },
			h("label", { for: "runs-text" }, "Text"),
			h("input", { id: "runs-text", type: "search", placeholder: "storage, name", spellcheck: "false", input: (event) => {
				filter = event.target.value.trim().toLowerCase();
				redraw();
			} })),
		table("runs", "Runs table", ["Run", "State", ["Checkpoints", "num"], ["Size", "num"], "Newest", "Age", "Held"]));
}
