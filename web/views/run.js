// run.js: one run: its checkpoints over time, what retention does with each, where they come from, and what a training would resume from.

import { get, runPath } from "../api/api.js";
import { $, fill, h, rows, sync, text } from "../widgets/dom.js";
import { bytes, number, seconds } from "../widgets/format.js";
import { button, checkpointHref, chip, fact, panel, stat, state, table, verifiedChip, when } from "../widgets/parts.js";
import { plot } from "../widgets/chart.js";
import { lineage } from "../widgets/graph.js";
import { lastPart, retentionOf, verdictOf } from "../store/health.js";
import { fate, oneRun } from "../store/runs.js";
import { lineageOf } from "../store/lineage.js";
import { jobsInOrder, refresh, store } from "../store/store.js";
import { aliasAsk, deleteAsk, holdAsk, setNote } from "./checkpoint_actions.js";

const CHECKPOINTS_MAX = 400;
export const needs = ["policies"];
export const title = (route) => `Run ${route.rest?.[0] ?? ""}`;

let at = null;                       // {storage, run, data, lineage, resume, metric, stamp}
let redraw = () => {};

const whole = (r) => ({ storage: at.storage, run: r, more: at.data });

const inRun = (run, r) => r?.storage === run.storage && r.name?.startsWith(run.run === "-" ? "" : `${run.run}/`);

async function load() {
	const mine = at;
	try {
		mine.data = await oneRun(mine.storage, mine.run, CHECKPOINTS_MAX);
		mine.why = "";
	} catch (error) {
		mine.why = error.message;
	}
	if (mine !== at) return;
	redraw();
	const newest = mine.data?.checkpoints?.[0];
	const [graph, resume] = await Promise.all([
		newest ? lineageOf({ storage: mine.storage, name: newest.name }, jobsInOrder(), (job) => inRun(mine, job.source)) : null,
		get(runPath(mine.storage, mine.run, ":resume")).catch((error) => ({ why: error.message, skipped: [] }))]);
	if (mine !== at) return;
	mine.lineage = graph;
	mine.resume = resume;
	redraw();
}

function timeline(data) {
	const list = [...data.checkpoints].reverse();
	const points = list.map((c, i) => ({ x: c.step ?? i, y: c.bytes, mark: { verified: "ok", damaged: "bad" }[c.verified?.state],
		words: [lastPart(c.name), `${bytes(c.bytes)}${c.bytes_shared ? `, ${bytes(c.bytes_shared)} shared` : ""}`, c.verified?.state
			|| "not verified", c.durable_at || c.modified_at] }));
	const names = [...new Set(list.flatMap((c) => Object.keys(c.metrics || {})))];
	const metric = names.includes(at.metric) ? at.metric : names[0];
	const values = list.map((c, i) => ({ x: c.step ?? i, y: c.metrics?.[metric],
		words: [lastPart(c.name), `${metric} ${number(c.metrics?.[metric])}`] }));
	return [panel("Timeline", h("p", { class: "small" }, "Size of each checkpoint by step; green is verified, red is damaged."),
		plot(points, { label: "Size of each checkpoint by step", y: bytes, x: (v) => number(Math.round(v)), bars: true, binary: true,
			height: 170 })),
	names.length ? panel("Metrics", h("div", { class: "tabs" }, names.map((name) => button(name, `metric-${name}`, () => {
		at.metric = name;
		redraw();
	}, { "aria-pressed": String(name === metric) }))),
	plot(values, { label: `${metric} by step`, y: number, x: (v) => number(Math.round(v)), zero: false, height: 170 })) : null];
}

function fateCell(c) {
	const f = fate(store.policies, at.storage, c.name);
	if (!f) return h("span", { class: "quiet" }, "stays: no policy");
	if ("unknown" in f) return h("span", { class: "error" }, `not known: ${f.unknown}`);
	if (f.goes) return chip(`goes: ${f.goes.why.replace("_", " ")}`, "bad", `policy ${f.goes.policy}`);
	return h("span", { class: "small" }, `stays: ${f.stays.join(", ").replaceAll("_", " ")}`);
}

function chips(c, aliases) {
	return [...Object.entries(aliases).filter(([, name]) => name === c.name).map(([alias]) => chip(alias, alias.startsWith("latest") ? "run"
		: "ok")),
		c.hold ? chip("held", "warn", c.hold.reason) : null];
}

function head(data) {
	const v = verdictOf(store, whole(at.run)), i = data.save_interval;
	return [h("div", { class: "stats" },
		stat("State", state({ safe: "ok", idle: "ok", late: "warn", bad: "bad" }[v.state] || "idle",
			{ safe: "safe", idle: "safe, not training", late: "look at it", bad: "at risk" }[v.state] || "unknown")),
		stat("Checkpoints", String(data.count)), stat("Size", bytes(data.bytes)),
		stat("Newest", v.newest ? lastPart(v.newest.name) : "none"), stat("Age", v.newest ? when(v.newest.durable_at || v.newest.modified_at)
			: "–"),
		i ? stat("A save takes", seconds(i.measured_save_s)) : null, i?.measured_stall_s !== null && i
			? stat("It stalls for", seconds(i.measured_stall_s)) : null,
		i?.async_s ? stat("Best every", seconds(Math.round(i.async_s))) : null),
	h("p", {}, v.words)];
}

function retention() {
	const r = retentionOf(store, { storage: at.storage, run: at.run });
	if (!r) return panel("Retention", h("p", {}, "No policy takes this run: all its checkpoints stay. ",
		h("code", {}, `dcpctl policy NAME ${at.storage}:${at.run} --keep-last 3 --preview`), " shows what one would do."));
	return panel("Retention", r.policies.map((p) => fact([["Policy", p.name], ["Keeps",
		Object.entries(p.keep).map(([k, v]) => `${k.replace("_", " ")} ${typeof v === "object" ? v.metric : v}`).join(", ")],
		["Trash", p.trash], ["Last look", p.status?.evaluated_at ? when(p.status.evaluated_at) : "not yet"],
			["Removed", p.status?.removed ? `${p.status.removed}, ${bytes(p.status.removed_bytes)}` : null],
		["Problem", p.status?.problem]])),
	r.problem ? h("p", { class: "error" }, r.problem) : r.remove.length ? [h("p", {},
		`The next look removes ${r.remove.length}, ${bytes(r.bytes)}:`),
		h("ul", {}, r.remove.slice(0, 20).map((x) => h("li", {}, lastPart(x.name), ` – ${x.why.replace("_", " ")}`)))]
		: h("p", {}, "Nothing would go now."));
}

function resume() {
	const r = at.resume;
	if (!r) return null;
	return panel("Resume", h("p", {}, r.checkpoint ? ["A training would go on from ",
		h("a", { href: checkpointHref(`${r.checkpoint.storage}:${r.checkpoint.name}`), "data-act": "resume" }, lastPart(r.checkpoint.name)),
			": "] : null, r.why),
		r.skipped?.length ? h("ul", {}, r.skipped.slice(0, 8).map((s) => h("li", {}, h("span", { class: "mono" }, lastPart(s.name)),
			` – ${s.why}`))) : null);
}

export function draw() {
	const data = at.data;
	text($("h-run"), at.run === "-" ? "Checkpoints without a run" : at.run);
	if (!data) {
		sync($("run-body"), h("p", {}, at.why || "Looking …"));
		return;
	}
	const listed = store.runs.find((r) => r.storage === at.storage && r.run === at.run);
	if (listed && listed.modified_at !== at.stamp) {
		const first = at.stamp === undefined;
		at.stamp = listed.modified_at;
		if (!first) load();
	}
	sync($("run-body"), []);
	sync($("run-head"), head(data));
	sync($("run-charts"), timeline(data));
	sync($("run-more"), [retention(), resume()]);
	sync($("run-lineage"), at.lineage?.nodes.length > 1 ? panel(`Lineage of ${lastPart(at.lineage.checkpoint.name)}`,
		lineage(at.lineage, `${at.lineage.checkpoint.storage}:${at.lineage.checkpoint.name}`)) : []);
	rows($("run-checkpoints").tBodies[0], data.checkpoints, (c) => c.name, (c) => [
		h("th", { scope: "row", class: "name" }, h("a", { href: checkpointHref(`${at.storage}:${c.name}`), "data-act": `open-${c.name}` },
			lastPart(c.name)), " ", chips(c, data.aliases)),
		h("td", {}, when(c.durable_at || c.modified_at)),
		h("td", { class: "num" }, bytes(c.bytes), c.bytes_shared ? h("div", { class: "small" }, `${bytes(c.bytes_shared)} shared`) : null),
		h("td", {}, Object.entries(c.metrics || {}).map(([k, v]) => h("div", { class: "metric" }, `${k} ${number(v)}`))),
		h("td", {}, verifiedChip(c.verified)),
		h("td", {}, fateCell(c)),
		h("td", { class: "nowrap" }, button(c.hold ? "Lift hold" : "Hold", `hold-${c.name}`,
			() => holdAsk({ storage: at.storage, name: c.name }, Boolean(c.hold), load),
				{ class: "quiet-button", "aria-label": `${c.hold ? "Lift hold of" : "Hold"} ${lastPart(c.name)}` }), " ",
			button("Alias", `alias-${c.name}`, () => aliasAsk({ storage: at.storage, name: c.name }, data.aliases, load),
				{ class: "quiet-button", "aria-label": `Alias for ${lastPart(c.name)}` }), " ",
			button("Delete", `delete-${c.name}`, () => deleteAsk({ storage: at.storage, name: c.name }, load),
				{ class: "quiet-button", "aria-label": `Delete ${lastPart(c.name)}` })),
	], "No checkpoint is left.");
	text($("run-rest"), data.checkpoints.length < data.count ? `The newest ${data.checkpoints.length} of ${data.count}.` : "");
}

export function mount(root, route, page) {
	redraw = page.draw;
	setNote(page.note);
	at = { storage: route.id, run: route.rest?.[0] ?? "-", data: null, lineage: null, resume: null, metric: "", stamp: undefined, why: "" };
	fill(root, [h("p", { class: "crumbs" }, h("a", { href: "#/runs" }, "All runs"), ` · storage ${at.storage}`),
		h("h2", { id: "h-run", tabindex: "-1" }, at.run),
		h("div", { id: "run-body" }), h("div", { id: "run-head" }), h("div", { id: "run-charts", class: "columns" }),
		h("h3", {}, "Checkpoints"), table("run-checkpoints", "Checkpoints of the run",
			["Checkpoint", "Durable", ["Size", "num"], "Metrics", "Verified", "Retention", "Action"]),
		h("p", { id: "run-rest", class: "small" }), h("div", { id: "run-more", class: "columns" }), h("div", { id: "run-lineage" })]);
	load();
	refresh("policies");
}
