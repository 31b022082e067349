// checkpoint.js: one checkpoint: what it is, its state dict as a tree and a table, and what can be done with it.

import { checkpointPath, get } from "../api/api.js";
import { $, fill, h, sync, text } from "../widgets/dom.js";
import { bytes, number, shape } from "../widgets/format.js";
import { button, chip, fact, jobLink, panel, stat, verifiedChip, when } from "../widgets/parts.js";
import { lineage } from "../widgets/graph.js";
import { VirtualTable } from "../widgets/vtable.js";
import { runHref } from "../store/health.js";
import { lineageOf } from "../store/lineage.js";
import { oneRun } from "../store/runs.js";
import { jobsInOrder } from "../store/store.js";
import { Tensors } from "../store/tensors.js";
import { aliasAsk, deleteAsk, exportAsk, holdAsk, loadAsk, setNote, verifyAsk } from "./checkpoint_actions.js";
import { drawTensor, onTensor } from "./tensor.js";

const GROUPS_MAX = 400;

export const needs = ["policies"];
export const title = (route) => `Checkpoint ${route.id}`;
const runOf = (name) => (name.includes("/") ? name.slice(0, name.lastIndexOf("/")) : "-");

let at = null;                       // what is on show
let redraw = () => {};

async function load() {
	const mine = at, ref = mine.ref;
	try {
		mine.record = await get(checkpointPath(ref));
		mine.why = "";
	} catch (error) {
		mine.why = error.message;
		redraw();
		return;
	}
	if (mine !== at) return;
	if (!mine.tensors || mine.etag !== mine.record.etag) {
		mine.etag = mine.record.etag;
		mine.tensors?.stop();
		mine.tensors = new Tensors(ref, (mine.record.tensors || 0) + (mine.record.values || 0), changed);
		mine.tensors.more();
	}
	redraw();
	const [graph, list, run] = await Promise.all([lineageOf(ref, jobsInOrder(), (job) => job.source?.storage === ref.storage
		&& job.source.name === ref.name),
		get(checkpointPath(ref, "/files")).catch(() => null),
		oneRun(ref.storage, runOf(ref.name), 200).catch(() => null)]);
	if (mine !== at) return;
	mine.lineage = graph;
	mine.files = new Map((list?.files || []).map((f) => [f.name, f.bytes]));
	mine.run = run;
	redraw();
}

/** More tensors are here: tree, search and the rows in sight may change. */
function changed() {
	if (!at) return;
	at.found = null;
	at.opened.clear();
	at.table.draw(true);
	redraw();
}

/** Positions of the rows that the search and the group leave; null: all of them, as they lie. */
function found() {
	if (!at?.tensors || (!at.text && !at.prefix)) return null;
	at.found ??= at.tensors.find(at.text, at.prefix);
	return at.found;
}

const count = () => (at?.tensors ? found()?.length ?? at.tensors.total : 0);
const itemAt = (i) => at.tensors.items[found() ? found()[i] : i];

function choose(fqn) {
	at.fqn = fqn;
	const query = new URLSearchParams({ ...(at.text && { q: at.text }), ...(at.prefix && { in: at.prefix }), t: fqn });
	history.replaceState(null, "", `#/checkpoints/${encodeURIComponent(`${at.ref.storage}:${at.ref.name}`)}?${query}`);
	at.table.draw(true);
	redraw();
	$("tensor-panel").scrollIntoView({ block: "nearest" });
}

function row(i) {
	const t = itemAt(i);
	if (!t) return null;
	const name = h("button", { type: "button", "data-act": `tensor-${t.fqn}`, title: t.fqn, click: () => choose(t.fqn) },
		h("bdi", {}, t.fqn));
	if (t.is_value) return [name, "value", t.opaque || JSON.stringify(t.value), "", ""];
	return [name, t.dtype + (t.blocks ? ` (${t.blocks})` : ""), shape(t.shape), bytes(t.bytes),
		String(t.chunk_count ?? t.chunks?.length ?? "")];
}

function sight(first, last) {
	if (!at?.tensors || found()) return;
	at.tensors.want(first);
	at.tensors.want(last);
}

/* ---- the tree: groups only, opened one by one ---- */

function branch(prefix) {
	const groups = at.opened.get(prefix) || at.tensors.groups(prefix);
	at.opened.set(prefix, groups);
	return h("ul", {}, groups.slice(0, GROUPS_MAX).map((g) => {
		const open = at.open.has(g.prefix);
		return h("li", {}, g.inner ? button(open ? "▾" : "▸", `twist-${g.prefix}`, () => {
			if (!at.open.delete(g.prefix)) at.open.add(g.prefix);
			redraw();
		}, { class: "twist", "aria-expanded": String(open), "aria-label": `${open ? "Close" : "Open"} ${g.prefix}` })
			: h("span", { class: "twist", "aria-hidden": "true" }, " "),
		button(h("bdi", {}, g.name), `group-${g.prefix}`, () => {
			at.prefix = at.prefix === g.prefix ? "" : g.prefix;
			at.found = null;
			at.table.node.scrollTop = 0;
			at.table.draw(true);
			redraw();
		}, { "aria-current": at.prefix === g.prefix ? "true" : null }), h("span", { class: "small" }, ` ${g.count} · ${bytes(g.bytes)}`),
		open ? branch(g.prefix) : null);
	}), groups.length > GROUPS_MAX ? h("li", { class: "small" }, `and ${groups.length - GROUPS_MAX} more: search for them`) : null);
}

/* ---- the frame ---- */

function head(c) {
	const aliases = Object.entries(at.run?.aliases || {}).filter(([, name]) => name === at.ref.name).map(([alias]) => chip(alias,
		alias.startsWith("latest") ? "run" : "ok"));
	return [h("div", { class: "stats" }, stat("Size", bytes(c.bytes), c.bytes_shared
		? h("span", { class: "small" }, `${bytes(c.bytes_shared)} shared`) : null),
		stat("Tensors", number(c.tensors)), stat("Values", number(c.values)), stat("Ranks", c.world_size ?? "–"), stat("Format", c.format),
			stat("Age", when(c.durable_at || c.modified_at)),
		h("div", { class: "stat" }, h("span", { class: "stat-label" }, "Verified"), h("span", {}, verifiedChip(c.verified)))),
	h("p", {}, aliases, " ", c.hold ? chip(`held: ${c.hold.reason}`, "warn") : null)];
}

function about(c) {
	const made = c.made_by;
	return panel("Where it comes from", fact([["Made by", made ? [`${made.kind}, `, jobLink(made.job), ` (dcpd ${made.version})`] : c.dcpd
		? "dcpd" : "not dcpd"], ["Step", c.step],
		["Durable", c.durable_at ? when(c.durable_at) : null], ["Replicated", c.replicated ? `in ${c.replicated.storage}` : null],
		["Metrics", Object.entries(c.metrics || {}).map(([k, v]) => `${k} ${number(v)}`).join(", ")],
			["Labels", Object.entries(c.labels || {}).map(([k, v]) => `${k}=${v}`).join(", ")],
		["Files", c.files], ["Chunks", c.chunks ? number(c.chunks) : null], ["Content digest", c.content_digest
			? h("span", { class: "mono" }, c.content_digest) : null],
		["Verified", c.verified ? [`${c.verified.state}, ${c.verified.level}, `, when(c.verified.at), " ", jobLink(c.verified.job, "job")]
			: "never"], ["Record", c.record_problem]]));
}

function tools(c) {
	const ref = at.ref, words = `${ref.storage}:${ref.name}`, list = at.run?.checkpoints || [],
		i = list.findIndex((x) => x.name === ref.name), before = i >= 0 ? list[i + 1] : null;
	const older = before ? `a=${encodeURIComponent(`${ref.storage}:${before.name}`)}&b=` : "a=";
	const compare = `#/compare?${older}${encodeURIComponent(words)}`;
	return [button("Load …", "load", () => loadAsk(ref, c.world_size)), h("a", { class: "button",
		href: `#/reshard/${encodeURIComponent(words)}`, "data-act": "reshard" }, "Reshard …"),
		button("Export …", "export", () => exportAsk(ref)), button("Verify …", "verify", () => verifyAsk(ref)),
			button(c.hold ? "Lift hold" : "Hold …", "hold", () => holdAsk(ref, Boolean(c.hold), load)),
		button("Alias …", "alias", () => aliasAsk(ref, at.run?.aliases, load)),
		h("a", { class: "button", href: compare, "data-act": "compare" }, before ? "Compare with the one before" : "Compare …"),
		button("Delete …", "delete", () => deleteAsk(ref, () => load()), { class: "danger" })];
}

export function draw() {
	if (at.why) {
		sync($("checkpoint-head"), h("p", { class: "error" }, at.why));
		sync($("checkpoint-tools"), []);
		return;
	}
	if (!at.record) {
		sync($("checkpoint-head"), h("p", {}, "Looking …"));
		return;
	}
	sync($("checkpoint-head"), head(at.record));
	sync($("checkpoint-tools"), tools(at.record));
	const all = at.tensors;
	$("browse").hidden = false;
	text($("tensors-count"), all.failed ? `Not all could be read: ${all.failed}` : at.text || at.prefix
		? `${count()} of ${all.total}${all.done ? "" : ", still reading"}`
		: all.done ? `${number(all.total)} tensors and values` : `${number(all.loaded)} of ${number(all.total)} read`);
	sync($("tree"), [button("All", "group-", () => {
		at.prefix = "";
		at.found = null;
		at.table.draw(true);
		redraw();
	}, { "aria-current": at.prefix ? null : "true" }), branch("")]);
	at.table.draw();
	drawTensor($("tensor-panel"), at.ref, at.fqn ? all.items.find((t) => t?.fqn === at.fqn) : null, at.files);
	sync($("checkpoint-more"), [about(at.record), at.lineage?.nodes.length > 1 ? panel("Lineage",
		lineage(at.lineage, `${at.ref.storage}:${at.ref.name}`)) : null]);
}

export function mount(root, route, page) {
	redraw = page.draw;
	setNote(page.note);
	onTensor(page.draw);
	const cut = route.id.indexOf(":"), ref = { storage: route.id.slice(0, cut), name: route.id.slice(cut + 1) };
	at = { ref, record: null, tensors: null, etag: "", files: new Map(), lineage: null, run: null, why: "", text: route.filter.get("q")
		|| "", prefix: route.filter.get("in") || "",
		fqn: route.filter.get("t") || "", found: null, open: new Set(), opened: new Map(), table: null };
	at.table = new VirtualTable({ label: "Tensors", heads: ["Tensor", "Dtype", "Shape", "Size", "Chunks"], count, row, sight,
		current: () => -1 });
	fill(root, [h("p", { class: "crumbs" }, h("a", { href: "#/checkpoints" }, "All checkpoints"), " · ",
		h("a", { href: runHref({ storage: ref.storage, run: runOf(ref.name) }) }, `run ${runOf(ref.name)}`)),
		h("h2", { id: "h-checkpoint", tabindex: "-1" }, h("bdi", {}, route.id)), h("div", { id: "checkpoint-head" }),
			h("div", { id: "checkpoint-tools", class: "tools" }),
		h("div", { id: "browse", hidden: true }, h("form", { class: "filters", role: "search", "aria-label": "Filter tensors",
			submit: (event) => event.preventDefault() },
			h("label", { for: "tensors-text" }, "Search"), h("input", { id: "tensors-text", type: "search", placeholder: "any part of a name",
				spellcheck: "false", value: at.text, input: (event) => {
				at.text = event.target.value.trim();
				at.found = null;
				at.table.node.scrollTop = 0;
				at.table.draw(true);
				redraw();
			} }), h("span", { id: "tensors-count", class: "small", role: "status" })),
		h("div", { class: "browse" }, h("div", { class: "scroll tree", id: "tree", role: "region", "aria-label": "Tree of the state dict",
			tabindex: "0" }), at.table.node),
		h("section", { id: "tensor-panel", class: "panel", "aria-label": "Tensor" })),
		h("div", { id: "checkpoint-more", class: "columns" })]);
	load();
}

export function leave() {
	at?.tensors?.stop();
	at = null;
}
