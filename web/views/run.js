// run.js: one run: its checkpoints over time, what retention does with each, where they come from, and what a training would resume from.

import { get, runPath } from "../api/api.js";
import { $, fill, h, rows, sync, text } from "../widgets/dom.js";
import { bytes, number, seconds } from "../widgets/format.js";
import { button, checkpointHref, chip, fact, panel, stat, state, table, verifiedChip, when } from "../widgets/parts.js";
import { plot } from "../widgets/chart.js";
import { lineage } from "../widgets/graph.js";
import { timeline } from "../widgets/timeline.js";
import { lastPart, retentionOf, savesOf, verdictOf } from "../store/health.js";
import { fate, oneRun, reason, ruleWords } from "../store/runs.js";
import { lineageOf } from "../store/lineage.js";
import { jobsInOrder, refresh, store } from "../store/store.js";
import { aliasAsk, deleteAsk, holdAsk, setNote } from "./checkpoint_actions.js";

const CHECKPOINTS_MAX = 400;
const SAVES_SHOWN = 60;
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

/** Names of the aliases that lead to a checkpoint, dcpd's own ones last. */
const aliasesOf = (c) => Object.entries(at.data.aliases).filter(([, name]) => name === c.name).map(([alias]) => alias)
	.sort((a, b) => a.startsWith("latest") - b.startsWith("latest"));

function steps(data) {
	return timeline(`Checkpoints of ${at.run} over time`, [...data.checkpoints].reverse().map((c) => {
		const f = fate(store.policies, at.storage, c.name), aliases = aliasesOf(c), shared = c.bytes_shared || 0;
		return { label: String(c.step ?? lastPart(c.name)), bytes: c.bytes || 0, shared, delta: c.format === "delta",
			goes: Boolean(f?.goes),
			mark: { verified: "ok", damaged: "bad" }[c.verified?.state] || "idle",
				href: checkpointHref(`${at.storage}:${c.name}`),
			flags: [...aliases, c.hold ? "held" : null].filter(Boolean),
			words: [lastPart(c.name), `${bytes(c.bytes)}${shared ? `, ${bytes(shared)} shared` : ""}`, c.verified?.state
				|| "not verified",
				aliases.length ? `alias ${aliases.join(", ")}` : null, c.hold ? `held: ${c.hold.reason}` : null,
					...Object.entries(c.metrics || {})
					.map(([k, v]) => `${k} ${number(v)}`), f?.goes ? `goes next: ${reason(f.goes.why, true)}` : f?.stays
					? `stays: ${f.stays.map((why) => reason(why)).join(", ")}` : null, c.durable_at
						|| c.modified_at].filter(Boolean) };
	}));
}

function metrics(data) {
	const list = [...data.checkpoints].reverse(), names = [...new Set(list.flatMap((c) => Object.keys(c.metrics || {})))];
	const metric = names.includes(at.metric) ? at.metric : names[0];
	if (names.length === 0) return null;
	const values = list.map((c, i) => ({ x: c.step ?? i, y: c.metrics?.[metric], words: [lastPart(c.name),
		`${metric} ${number(c.metrics?.[metric])}`] }));
	return panel("Metrics", h("div", { class: "tabs" }, names.map((name) => button(name, `metric-${name}`, () => {
		at.metric = name;
		redraw();
	}, { "aria-pressed": String(name === metric) }))),
	plot(values, { label: `${metric} by step`, y: number, x: (v) => number(Math.round(v)), zero: false, height: 170 }));
}

const clock = (v) => new Date(v).toTimeString().slice(0, 5);

/** What saves cost: how long they stall the trainer, how far the disk lags behind, how fast they are. */
function saves() {
	const jobs = savesOf({ storage: at.storage, run: at.run }).filter((j) => j.state === "succeeded").slice(-SAVES_SHOWN);
	const between = (a, b) => (a && b ? (Date.parse(b) - Date.parse(a)) / 1000 : NaN);
	const stall = (at.data.save_interval?.last || []).filter((m) => Number.isFinite(m.stall_s)).reverse();
	const kinds = { stall: ["Stall", stall.map((m, i) => ({ x: Date.parse(m.at) || i, y: m.stall_s,
		words: [`stalled for ${seconds(m.stall_s)}`] })), seconds],
		lag: ["Lag", jobs.map((j) => ({ x: Date.parse(j.finished_at), y: between(j.milestones?.snapshotted, j.milestones?.durable),
			words: [lastPart(j.target.name),
				`durable ${seconds(between(j.milestones?.snapshotted, j.milestones?.durable))} after the copy`] })),
				seconds],
		throughput: ["Throughput", jobs.map((j) => ({ x: Date.parse(j.finished_at),
			y: j.progress?.bytes_done / between(j.started_at, j.finished_at),
			words: [lastPart(j.target.name),
				`${bytes(j.progress?.bytes_done)} in ${seconds(between(j.started_at, j.finished_at))}`] })),
		(v) => `${bytes(v)}/s`] };
	const [words, points, y] = kinds[at.cost], numbered = at.cost === "stall" && !stall.some((m) => m.at);
	return panel("Saves", h("div", { class: "tabs" }, Object.entries(kinds).map(([key, [name]]) => button(name, `cost-${key}`, () => {
		at.cost = key;
		redraw();
	}, { "aria-pressed": String(key === at.cost) }))),
	plot(points, { label: `${words} of the last saves`, y, x: numbered ? (v) => `#${Math.round(v) + 1}` : clock,
		binary: at.cost === "throughput", height: 170,
		empty: "No save that this daemon has seen." }));
}

function fateCell(c) {
	const f = fate(store.policies, at.storage, c.name);
	if (!f) return h("span", { class: "quiet" }, "stays: no policy");
	if ("unknown" in f) return h("span", { class: "error" }, `not known: ${f.unknown}`);
	if (f.goes) return chip(`goes: ${f.goes.why.replace("_", " ")}`, "bad", `policy ${f.goes.policy}`);
	return h("span", { class: "small" }, `stays: ${f.stays.join(", ").replaceAll("_", " ")}`);
}

function chips(c, aliases) {
	return [...Object.entries(aliases).filter(([, name]) => name === c.name).map(([alias]) => chip(alias, alias.startsWith("latest")
		? "run"
		: "ok")),
		c.hold ? chip("held", "warn", c.hold.reason) : null];
}

function head(data) {
	const v = verdictOf(store, whole(at.run)), i = data.save_interval;
	return [h("div", { class: "stats" },
		stat("State", state({ safe: "ok", idle: "ok", late: "warn", bad: "bad" }[v.state] || "idle",
			{ safe: "safe", idle: "safe, not training", late: "look at it", bad: "at risk" }[v.state] || "unknown")),
		stat("Checkpoints", String(data.count)), stat("Size", bytes(data.bytes)),
		stat("Newest", v.newest ? lastPart(v.newest.name) : "none"), stat("Age", v.newest ? when(v.newest.durable_at
			|| v.newest.modified_at)
			: "–"),
		i ? stat("A save takes", seconds(i.measured_save_s)) : null, i?.measured_stall_s !== null && i
			? stat("It stalls for", seconds(i.measured_stall_s)) : null,
		i?.async_s ? stat("Best every", seconds(Math.round(i.async_s))) : null),
	h("p", {}, v.words)];
}

function retention() {
	const r = retentionOf(store, { storage: at.storage, run: at.run }), query = new URLSearchParams({ storage: at.storage,
		match: at.run });
	if (!r) return panel("Retention", h("p", {}, "No policy takes this run: all its checkpoints stay."),
		h("a", { class: "button", href: `#/policies/${encodeURIComponent("+")}?${query}`, "data-act": "new-policy" },
			"Make a policy …"));
	return panel("Retention", r.policies.map((p) => h("div", {}, h("p", {}, h("a", { href: `#/policies/${encodeURIComponent(p.name)}`,
		"data-act": `policy-${p.name}` }, p.name), ": ", ruleWords(p), p.paused ? [" ", chip("paused", "idle")] : null),
	fact([["Trash", p.trash ? `for ${p.trash}` : null], ["Last look", p.status?.evaluated_at ? when(p.status.evaluated_at) : "not yet"],
		["Removed", p.status?.removed ? `${p.status.removed}, ${bytes(p.status.removed_bytes)}` : null],
			["Problem", p.status?.problem]]))),
	r.problem ? h("p", { class: "error" }, r.problem) : r.remove.length ? [h("p", {},
		`The next look removes ${r.remove.length}, ${bytes(r.bytes)}:`),
		h("ul", {}, r.remove.slice(0, 20).map((x) => h("li", {}, lastPart(x.name), ` – ${reason(x.why, true)}`)))]
		: h("p", {}, "Nothing would go now."));
}

function resume() {
	const r = at.resume;
	if (!r) return null;
	return panel("Resume", h("p", {}, r.checkpoint ? ["A training would go on from ",
		h("a", { href: checkpointHref(`${r.checkpoint.storage}:${r.checkpoint.name}`), "data-act": "resume" },
			lastPart(r.checkpoint.name)),
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
	sync($("run-timeline"), panel("Timeline", steps(data)));
	sync($("run-charts"), [metrics(data), saves()]);
	sync($("run-more"), [retention(), resume()]);
	sync($("run-lineage"), at.lineage?.nodes.length > 1 ? panel(`Lineage of ${lastPart(at.lineage.checkpoint.name)}`,
		lineage(at.lineage, `${at.lineage.checkpoint.storage}:${at.lineage.checkpoint.name}`)) : []);
	rows($("run-checkpoints").tBodies[0], data.checkpoints, (c) => c.name, (c) => [
		h("th", { scope: "row", class: "name" }, h("a", { href: checkpointHref(`${at.storage}:${c.name}`),
			"data-act": `open-${c.name}` },
			lastPart(c.name)), " ", chips(c, data.aliases)),
		h("td", {}, when(c.durable_at || c.modified_at)),
		h("td", { class: "num" }, bytes(c.bytes), c.bytes_shared ? h("div", { class: "small" }, `${bytes(c.bytes_shared)} shared`)
			: null),
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
	at = { storage: route.id, run: route.rest?.[0] ?? "-", data: null, lineage: null, resume: null, metric: "", cost: "throughput",
		stamp: undefined, why: "" };
	fill(root, [h("p", { class: "crumbs" }, h("a", { href: "#/runs" }, "All runs"), ` · storage ${at.storage}`),
		h("h2", { id: "h-run", tabindex: "-1" }, at.run),
		h("div", { id: "run-body" }), h("div", { id: "run-head" }), h("div", { id: "run-timeline" }), h("div", { id: "run-charts",
			class: "columns" }),
		h("h3", {}, "Checkpoints"), table("run-checkpoints", "Checkpoints of the run",
			["Checkpoint", "Durable", ["Size", "num"], "Metrics", "Verified", "Retention", "Action"]),
		h("p", { id: "run-rest", class: "small" }), h("div", { id: "run-more", class: "columns" }),
			h("div", { id: "run-lineage" })]);
	load();
	refresh("policies");
}
