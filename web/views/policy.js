// policy.js: one policy as a form. While one edits, the daemon says what would go by it, and why each other checkpoint stays.

import { call, post } from "../api/api.js";
import { $, confirm, fill, h, sync, text, tip } from "../widgets/dom.js";
import { bytes } from "../widgets/format.js";
import { checkpointHref, chip, field, panel, plainTable, stat } from "../widgets/parts.js";
import { lastPart } from "../store/health.js";
import { reason, ruleWords } from "../store/runs.js";
import { refresh, store } from "../store/store.js";

const PAUSE_MS = 250;
const ROWS = 100, BLOCKS = 300;
const UNITS = { MiB: 1024 ** 2, GiB: 1024 ** 3, TiB: 1024 ** 4 };

export const needs = ["policies"];
export const title = (route) => (route.id === "+" ? "New policy" : `Policy ${route.id}`);

let at = null;                       // {name, isNew, filled, shown, problem, turn}
let redraw = () => {};
let note = () => {};
let timer = 0;

const value = (id) => $(id).value.trim();
const nameNow = () => (at.isNew ? value("policy-name") : at.name);

/** The document that the form stands for; throws where the form is no policy yet. */
function read() {
	const keep = {}, number = (id, key) => { if (value(id)) keep[key] = Number(value(id)); };
	number("keep-last", "last");
	number("keep-every-steps", "every_steps");
	if (value("keep-every")) keep.every = value("keep-every");
	if (value("best-metric")) keep.best = { metric: value("best-metric"), mode: value("best-mode"), count: Number(value("best-count")
		|| 1) };
	if (value("goes-ttl")) keep.ttl = value("goes-ttl");
	if (value("goes-bytes")) keep.bytes = Math.round(Number(value("goes-bytes")) * UNITS[value("goes-unit")]);
	if (Object.keys(keep).length === 0) throw new Error("Say what stays: at least one rule is needed.");
	return { storage: value("policy-storage"), match: value("policy-match"), keep, ...($("policy-verified").checked
		&& { verified_only: true }),
		...(value("policy-trash") && { trash: value("policy-trash") }) };
}

/** Asks what the form would do. False: it was edited meanwhile, and a newer question is on its way. */
async function preview() {
	const mine = at, turn = mine.turn = (mine.turn || 0) + 1;
	let shown = null, problem = null;
	try {
		mine.document = read();
		shown = await post(`/v1/policies/${encodeURIComponent(nameNow() || "new")}:preview`, mine.document);
	} catch (error) {
		problem = error;
	}
	if (mine !== at || turn !== mine.turn) return false;
	mine.shown = shown || mine.shown;
	mine.problem = problem;
	text($("announce"), problem ? `The policy is refused: ${problem.message}`
		: `${shown.remove.length} would go, ${shown.keep.length} would stay`);
	redraw();
	return true;
}

function edited() {
	at.turn = (at.turn || 0) + 1;      // an answer on its way is to an older form: preview drops it
	clearTimeout(timer);
	timer = setTimeout(preview, PAUSE_MS);
}

async function save(event) {
	event.preventDefault();
	clearTimeout(timer);
	if (!(await preview())) return;  // Enter may come before the pause after the last key is over
	const name = nameNow(), doc = at.document, goes = at.shown?.remove || [];
	if (!doc || at.problem) return;
	const paused = $("policy-paused").checked, put = { ...doc, ...(paused && { paused }), ...($("policy-confirm").checked
		&& { confirm: true }) };
	if (goes.length && !paused && !(await confirm(`Keep policy ${name}?`,
		`It removes ${goes.length} checkpoint${goes.length === 1 ? "" : "s"}, `
		+ `${bytes(at.shown.remove_bytes)}, at once${doc.trash ? `; the trash keeps them for ${doc.trash}` : ", for good"}.`,
			"Yes, keep it",
		[h("ul", {}, goes.slice(0, 12).map((x) => h("li", { class: "mono" }, x.name)), goes.length > 12 ? h("li", {},
			`and ${goes.length - 12} more`)
			: null)]))) return;
	try {
		await call("PUT", `/v1/policies/${encodeURIComponent(name)}`, put);
	} catch (error) {
		at.problem = error;
		if (/"confirm"/.test(error.message)) $("policy-confirm-line").hidden = false;
		redraw();
		return;
	}
	refresh("policies");
	note(`Policy ${name} is kept${paused ? ", and paused" : ""}.`);
	location.hash = "#/policies";
}

/* ---- what would come of it ---- */

const stepOf = (name) => Number(/(\d+)$/.exec(name)?.[1] ?? -1);

/** Runs with their checkpoints in the order of steps: [{run, items: [{name, bytes, goes?, stays?}]}]. */
function byRun(shown) {
	const runs = new Map();
	for (const x of [...shown.remove.map((r) => ({ ...r, goes: r.why })), ...shown.keep.map((k) => ({ ...k, stays: k.why }))]) {
		const run = x.name.includes("/") ? x.name.slice(0, x.name.lastIndexOf("/")) : "-";
		if (!runs.has(run)) runs.set(run, []);
		runs.get(run).push(x);
	}
	return [...runs].map(([run, items]) => ({ run, items: items.sort((a, b) => stepOf(a.name) - stepOf(b.name) || (a.name < b.name ? -1
		: 1)) }));
}

const stays = (x) => x.stays.map((why) => reason(why)).join(", ");
const fateWords = (x) => (x.goes ? `goes: ${reason(x.goes, true)}` : `stays: ${stays(x)}`);

function strip({ run, items }) {
	const goes = items.filter((x) => x.goes).length;
	return h("div", { class: "fate-run" }, h("div", { class: "item-head" }, h("bdi", { class: "mono" }, run === "-" ? "without a run"
		: run),
		h("span", { class: "small" }, `${goes} of ${items.length} ${goes === 1 ? "goes" : "go"}`)),
	h("div", { class: "fates", role: "img", "aria-label": `${run}: ${goes} of ${items.length} checkpoints go` },
		items.slice(-BLOCKS).map((x) => tip(h("span", { class: x.goes ? "fate goes" : "fate" }),
			() => [lastPart(x.name), bytes(x.bytes), fateWords(x)]))));
}

function outcome() {
	const s = at.shown;
	if (!s) return null;
	const kept = s.keep.reduce((sum, x) => sum + x.bytes, 0), runs = byRun(s), all = runs.flatMap((r) => r.items);
	return [panel(at.problem ? "What would come of it (as it was valid last)" : "What would come of it",
		h("div", { class: "stats" }, stat("Would go", String(s.remove.length)), stat("Frees", bytes(s.remove_bytes)),
			stat("Stay", String(s.keep.length)),
			stat("They take", bytes(kept)), stat("Runs", String(runs.length))),
		s.over_bytes ? h("p", { class: "error" }, `The budget is exceeded by ${bytes(s.over_bytes)} that must stay.`) : null,
		runs.length ? [h("ul", { class: "legend" }, h("li", { class: "k1" }, "stays"), h("li", { class: "k4" }, "goes")),
			runs.slice(0, 20).map(strip)]
			: h("p", {}, "It matches no run now.")),
	all.length ? plainTable("policy-fates", "Checkpoints and what would come of them", [["Checkpoint", "name"], ["Size", "num"], "Fate",
		"Why"],
		[...all.filter((x) => x.goes), ...all.filter((x) => !x.goes)].slice(0, ROWS).map((x) => [
			h("a", { href: checkpointHref(`${at.document?.storage ?? ""}:${x.name}`) }, h("bdi", {}, x.name)), bytes(x.bytes),
			x.goes ? chip("goes", "bad") : chip("stays", "ok"),
				x.goes ? `${reason(x.goes, true)}${x.policy !== nameNow() ? ` (policy ${x.policy})` : ""}`
				: stays(x)])) : null,
	all.length > ROWS ? h("p", { class: "small" }, `${all.length - ROWS} more are not shown.`) : null];
}

/* ---- the form ---- */

/** A policy's form is closed until the policy is read: what one typed before would be overwritten by it, or stand for it. */
function setEditable(on) {
	for (const control of $("policy-form").elements) control.disabled = !on;
}

function load(policy, filter) {
	const set = (id, v) => { $(id).value = v ?? ""; }, keep = policy?.keep || {};
	const unit = keep.bytes >= UNITS.TiB ? "TiB" : keep.bytes >= UNITS.GiB || !keep.bytes ? "GiB" : "MiB";
	if (policy || filter.get("storage")) set("policy-storage", policy?.storage ?? filter.get("storage"));
	set("policy-match", policy?.match ?? filter.get("match"));
	set("keep-last", policy ? keep.last : 3);
	set("keep-every-steps", keep.every_steps);
	set("keep-every", keep.every);
	set("best-metric", keep.best?.metric);
	set("best-mode", keep.best?.mode ?? "min");
	set("best-count", keep.best?.count ?? 1);
	set("goes-ttl", keep.ttl);
	set("goes-unit", unit);
	set("goes-bytes", keep.bytes === undefined ? "" : String(keep.bytes / UNITS[unit]));
	set("policy-trash", policy ? policy.trash : "72h");
	$("policy-verified").checked = Boolean(policy?.verified_only);
	$("policy-paused").checked = Boolean(policy?.paused);
	if (policy) $("policy-confirm").checked = true;
	setEditable(true);
	at.filled = true;
	preview();
}

export function draw() {
	const policy = store.policies.find((p) => p.name === at.name);
	if (!at.filled && policy) load(policy, null);
	sync($("policy-problem"), at.problem ? h("div", { class: "notice bad" }, h("span", {}, at.problem.message),
		h("span", { class: "mono" }, at.problem.body?.pointer || "")) : []);
	let words = "";
	try {
		words = ruleWords(read());
	} catch { /* the notice says what is missing */ }
	text($("policy-words"), words);
	sync($("policy-outcome"), outcome());
	$("policy-save").disabled = !at.filled || !at.shown || Boolean(at.problem && !/"confirm"/.test(at.problem.message)) || !nameNow();
}

const input = (id, more = {}) => h("input", { id, spellcheck: "false", autocomplete: "off", input: edited, ...more });
const select = (id, options) => h("select", { id, change: edited }, options.map((o) => h("option", {}, o)));
const check = (id, label, more = {}) => h("p", { id: `${id}-line`, ...more }, h("input", { id, type: "checkbox", change: edited }), " ",
	h("label", { for: id }, label));

export function mount(root, route, page) {
	redraw = page.draw;
	note = page.note;
	at = { name: route.id, isNew: route.id === "+", filled: false, shown: null, problem: null };
	const storages = [...new Set([...store.storages.map((s) => s.name), route.filter.get("storage")].filter(Boolean))];
	const metrics = [...new Set(store.runs.flatMap((r) => (r.more?.checkpoints || []).slice(0, 20).flatMap((c) => Object.keys(c.metrics
		|| {}))))];
	fill(root, [h("p", { class: "crumbs" }, h("a", { href: "#/policies" }, "All policies")),
		h("h2", { id: "h-policy", tabindex: "-1" }, title(route)),
		h("form", { id: "policy-form", class: "panel", "aria-label": "Policy", submit: save },
		h("div", { class: "fields" }, at.isNew ? field("policy-name", "Name", input("policy-name", { required: true,
			maxlength: "64",
			pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]*", placeholder: "nightly" })) : null,
		field("policy-storage", "Storage", select("policy-storage", storages)),
		field("policy-match", "Runs", input("policy-match", { required: true, list: "policy-runs", placeholder: "run*" }),
			"* stands for any characters")),
		h("datalist", { id: "policy-runs" }, [...new Set(store.runs.map((r) => r.run))].slice(0, 500).map((r) => h("option",
			{ value: r }))),
		h("h3", {}, "What stays, in each run"),
		h("div", { class: "fields" }, field("keep-last", "The newest", input("keep-last", { type: "number", min: "1" })),
			field("keep-every-steps", "One each N steps", input("keep-every-steps", { type: "number", min: "1",
				placeholder: "1000" })),
			field("keep-every", "One each", input("keep-every", { placeholder: "24h" }), "a time: 30m, 24h, 7d"),
			field("best-metric", "The best by", input("best-metric", { placeholder: "loss", list: "policy-metrics" })),
			field("best-mode", "Best is the", h("select", { id: "best-mode", change: edited }, h("option", { value: "min" },
				"lowest"),
				h("option", { value: "max" }, "highest"))),
			field("best-count", "How many", input("best-count", { type: "number", min: "1", value: "1" }))),
		h("datalist", { id: "policy-metrics" }, metrics.map((m) => h("option", { value: m }))),
		h("h3", {}, "When the others go"),
		h("div", { class: "fields" }, field("goes-ttl", "When older than", input("goes-ttl", { placeholder: "at once" }),
			"a time: 72h, 30d; empty: at once"),
			field("goes-bytes", "While all take more than", input("goes-bytes", { type: "number", min: "0", step: "any",
				placeholder: "no budget" }),
				"the oldest go first"),
			field("goes-unit", "Unit", select("goes-unit", Object.keys(UNITS))),
			field("policy-trash", "Kept in the trash for", input("policy-trash", { placeholder: "not at all" }),
				"they can be brought back so long")),
		check("policy-verified", "Only verified checkpoints count for what stays"), check("policy-paused",
			"Paused: it removes nothing yet"),
		check("policy-confirm", "A pattern for no run, or for every run, is meant", { hidden: true }),
		h("p", { id: "policy-words", class: "lead" }), h("div", { id: "policy-problem" }),
		h("p", { class: "actions" }, h("a", { class: "button", href: "#/policies" }, "Leave it"),
			h("button", { id: "policy-save", type: "submit", class: "primary", disabled: true }, "Keep this policy"))),
		h("div", { id: "policy-outcome", class: "stack", "aria-live": "off" })]);
	if (at.isNew) load(null, route.filter);
	else {
		setEditable(false);
		refresh("policies");
	}
}

export function leave() {
	clearTimeout(timer);
	at = { ...at, turn: -1 };
}
