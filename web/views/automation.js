// automation.js: what follows a checkpoint by itself, and who is told: chains with their executions, webhooks with their deliveries.

import { all, call, get, post } from "../api/api.js";
import { $, confirm, fill, h, sync } from "../widgets/dom.js";
import { button, chip, field, jobLink, plainTable, refLink, state, when } from "../widgets/parts.js";
import { store } from "../store/store.js";

const REFRESH_MS = 5000;
const SHOWN = 10;
const EVENTS = ["checkpoint.durable", "checkpoint.verified", "checkpoint.damaged", "checkpoint.removed", "checkpoint.replicated",
	"job.failed",
	"chain.done", "chain.failed"];
const EXAMPLE = `[{"verify": {"level": "digest"}},
 {"copy": {"storage": "archive"}}]`;

let at = null;                       // {chains, hooks: [{…, deliveries}], why: {chains, hooks}}
let redraw = () => {};
let note = () => {};
let timer = 0;

const chainPath = (name) => `/v1/chains/${encodeURIComponent(name)}`;
const hookPath = (name, tail = "") => `/v1/webhooks/${encodeURIComponent(name)}${tail}`;

async function load() {
	const mine = at;
	const [chains, hooks] = await Promise.allSettled([
		all("/v1/chains", "chains", 200).then((list) => Promise.all(list.map((c) => get(chainPath(c.name)).catch(() => c)))),
		all("/v1/webhooks", "webhooks", 200).then((list) => Promise.all(list.map(async (w) => ({ ...w,
			deliveries: (await get(`${hookPath(w.name, "/deliveries")}?page_size=${SHOWN}`).catch(() => null))?.deliveries
				|| [] }))))]);
	if (mine !== at) return;
	mine.chains = chains.value ?? mine.chains;
	mine.hooks = hooks.value ?? mine.hooks;
	mine.why = { chains: chains.reason?.message, hooks: hooks.reason?.message };
	redraw();
}

async function act(what, work) {
	try {
		await work();
		return true;
	} catch (error) {
		note(`Could not ${what}: ${error.message}${error.body?.pointer ? ` (${error.body.pointer})` : ""}`);
		return false;
	} finally {
		load();
	}
}

/* ---- chains ---- */

/** "export → hf, safetensors" of {"export": {"storage": "hf", "format": "safetensors"}}. */
function stepWords(step) {
	const [kind, fields] = Object.entries(step)[0] ?? ["?", {}];
	return [kind, fields.storage ? ` → ${fields.storage}` : "", fields.format ? `, ${fields.format}` : "", fields.level
		? ` ${fields.level}` : ""].join("");
}

const flow = (steps) => h("ol", { class: "flow" }, h("li", { class: "begin" }, "durable"),
	steps.map((s) => h("li", { title: JSON.stringify(s) }, stepWords(s))));
const executionMark = { done: "succeeded", failed: "failed", running: "running", waiting: "queued", skipped: "cancelled" };

function executions(chain) {
	const last = chain.status?.last || [];
	if (last.length === 0) return h("p", { class: "quiet" }, "No checkpoint has come since it was set.");
	return plainTable(`executions-${chain.name}`, `Last executions of ${chain.name}`, ["Checkpoint", "State", "Steps", "Since"],
		last.map((x) => [
		refLink(x.checkpoint), [state(executionMark[x.state], x.state), x.error ? h("div", { class: "error" }, x.error.detail
			|| x.error.code) : null],
		(x.jobs || []).map((j) => h("div", {}, jobLink(j.job, j.step), " ", h("span", { class: "small" }, j.state))),
			when(x.finished_at || x.created_at)]));
}

function chainCard(c) {
	const s = c.status || {}, mark = s.last?.[0]?.state === "failed" ? "bad" : s.running || s.waiting ? "run" : "ok";
	return h("article", { class: `card ${mark}`, "data-chain": c.name },
		h("div", { class: "card-head" }, h("h4", {}, c.name), h("span", { class: "small" }, h("bdi", { class: "mono" },
			`${c.storage}:${c.match || "*"}`))),
		flow(c.steps), h("p", {}, ["running", "waiting", "done", "failed", "skipped"].filter((k) => s[k])
			.map((k) => chip(`${s[k]} ${k}`, { failed: "bad", done: "ok", running: "run" }[k]))),
		executions(c), h("p", { class: "small" },
			`${c.behind === "all" ? "Takes all checkpoints" : "Takes the newest where it is behind"}; set by uid ${c.uid}.`),
		h("div", { class: "tools" }, button("Delete …", `unchain-${c.name}`, async () => {
			if (await confirm(`Delete chain ${c.name}?`, "Its executions go with it; a job that runs goes on.",
				"Yes, delete it"))
				act(`delete chain ${c.name}`, () => call("DELETE", chainPath(c.name)));
		}, { "aria-label": `Delete chain ${c.name}` })));
}

function storageSelect(id, empty) {
	return h("select", { id }, empty ? h("option", { value: "" }, empty) : null, store.storages.map((s) => h("option", {}, s.name)));
}

let draft = EXAMPLE;                 // what was typed last: a refusal does not lose it

async function newChain() {
	const name = h("input", { id: "chain-name", maxlength: "64", spellcheck: "false" }), match = h("input", { id: "chain-match",
		value: "*", spellcheck: "false" });
	const steps = h("textarea", { id: "chain-steps", rows: "6", spellcheck: "false" }, draft),
		storage = storageSelect("chain-storage");
	if (!(await confirm("New chain", "Its steps run in order for each checkpoint that becomes durable: verify, export, copy, delete.",
		"Set it",
		[h("div", { class: "fields" }, field("chain-name", "Name", name), field("chain-storage", "Storage", storage),
			field("chain-match", "Runs", match)),
			field("chain-steps", "Steps (JSON)", steps)]))) return;
	draft = steps.value;
	await act(`set chain ${name.value.trim()}`, () => call("PUT", chainPath(name.value.trim()),
		{ storage: storage.value, match: match.value.trim() || "*", steps: JSON.parse(steps.value) }));
}

/* ---- webhooks ---- */

function deliveries(w) {
	if (w.deliveries.length === 0) return h("p", { class: "quiet" }, "Nothing was sent yet.");
	return plainTable(`deliveries-${w.name}`, `Last deliveries of ${w.name}`, ["Event", "About", "State", "When", "Action"],
		w.deliveries.map((d) => [
		d.event, d.name ? refLink({ storage: d.storage, name: d.name }) : d.job ? jobLink(d.job) : "–",
		[state(executionMark[d.state], d.state), h("div", { class: "small" }, [d.status ? `answered ${d.status}` : null,
			`${d.attempts} attempt${d.attempts === 1 ? "" : "s"}`].filter(Boolean).join(", ")), d.error && d.state !== "done"
			? h("div", { class: "error" }, d.error) : null],
		[when(d.last_at || d.created_at), d.state === "waiting" && d.next_at && d.attempts ? h("div", { class: "small" },
			`again ${d.next_at.slice(11, 19)}`) : null],
		d.state === "failed" || d.state === "skipped" || (d.state === "waiting" && d.attempts) ? button("Send again",
			`resend-${d.id}`,
			() => act("send it again", () => post(hookPath(w.name, `/deliveries/${d.id}:retry`))), { class: "quiet-button" })
				: null]));
}

function hookCard(w) {
	const last = w.deliveries[0], mark = !last ? "idle" : last.state === "failed" || (last.state === "waiting" && last.attempts) ? "bad"
		: "ok";
	return h("article", { class: `card ${mark}`, "data-webhook": w.name },
		h("div", { class: "card-head" }, h("h4", {}, w.name), h("span", { class: "small" }, w.storage || w.match
			? h("bdi", { class: "mono" }, `${w.storage || "*"}:${w.match || "*"}`) : "all storages")),
		h("p", { class: "mono card-words" }, w.url), h("p", {}, w.events.map((e) => chip(e, "idle"))), deliveries(w),
		h("p", { class: "small" }, `Signed with the secret ${w.secret}.`),
		h("div", { class: "tools" }, button("Send a test", `test-${w.name}`, () => act(`test ${w.name}`,
			() => post(hookPath(w.name, ":test"))),
			{ "aria-label": `Send a test to ${w.name}` }),
		button("Delete …", `unhook-${w.name}`, async () => {
			if (await confirm(`Delete webhook ${w.name}?`, "What waits to be delivered goes with it.", "Yes, delete it"))
				act(`delete webhook ${w.name}`, () => call("DELETE", hookPath(w.name)));
		}, { "aria-label": `Delete webhook ${w.name}` })));
}

async function newHook() {
	const name = h("input", { id: "hook-name", maxlength: "64", spellcheck: "false" }), url = h("input", { id: "hook-url", type: "url",
		placeholder: "https://…" });
	const secret = h("input", { id: "hook-secret", spellcheck: "false" }), storage = storageSelect("hook-storage", "all");
	const match = h("input", { id: "hook-match", placeholder: "all", spellcheck: "false" });
	const boxes = EVENTS.map((e, i) => h("input", { id: `hook-event-${i}`, type: "checkbox", value: e, checked: i === 0 }));
	if (!(await confirm("New webhook", "The address is told what happens, by a signed POST.", "Set it",
		[h("div", { class: "fields" }, field("hook-name", "Name", name), field("hook-storage", "Storage", storage),
			field("hook-match", "Runs", match)),
			field("hook-url", "Address", url), field("hook-secret", "Secret", secret,
				"a file in secrets/ of the state directory"),
			h("fieldset", {}, h("legend", {}, "Events"), boxes.map((box, i) => h("div", {}, box, " ",
				h("label", { for: box.id }, EVENTS[i]))))]))) return;
	await act(`set webhook ${name.value.trim()}`, () => call("PUT", hookPath(name.value.trim()), { url: url.value.trim(),
		secret: secret.value.trim(),
		events: boxes.filter((b) => b.checked).map((b) => b.value), ...(storage.value && { storage: storage.value }),
		...(match.value.trim() && { match: match.value.trim() }) }));
}

/* ---- the view ---- */

const part = (list, why, build, empty) => (why ? h("p", { class: "error" }, why) : !list ? h("p", {}, "Looking …")
	: list.length ? list.map(build) : h("p", { class: "quiet" }, empty));

export function draw() {
	sync($("chains"), part(at.chains, at.why.chains, chainCard, "No chain is set: nothing follows a checkpoint by itself."));
	sync($("webhooks"), part(at.hooks, at.why.hooks, hookCard, "No webhook is set: nobody is told."));
}

export function mount(root, route, page) {
	redraw = page.draw;
	note = page.note;
	at = { chains: null, hooks: null, why: {} };
	fill(root, [h("h2", { id: "h-automation", tabindex: "-1" }, "Chains and webhooks"),
		h("div", { class: "item-head" }, h("h3", {}, "Chains"), button("New chain …", "new-chain", newChain)),
		h("div", { id: "chains", class: "cards wide-cards" }),
		h("div", { class: "item-head" }, h("h3", {}, "Webhooks"), button("New webhook …", "new-hook", newHook)),
		h("div", { id: "webhooks", class: "cards wide-cards" })]);
	load();
	timer = setInterval(() => { if (!document.hidden) load(); }, REFRESH_MS);
}

export function leave() {
	clearInterval(timer);
	at = { chains: null, hooks: null, why: {} };
}
