// policies.js: how long checkpoints are kept: each policy in words, what it is about to remove, and a button to pause it.

import { call, post } from "../api/api.js";
import { confirm, fill, h, sync } from "../widgets/dom.js";
import { bytes } from "../widgets/format.js";
import { button, chip, fact, state, when } from "../widgets/parts.js";
import { refresh, store } from "../store/store.js";
import { ruleWords, runsOfPolicy } from "../store/runs.js";

export const needs = ["policies"];
export const policyHref = (name, more = "") => `#/policies/${encodeURIComponent(name)}${more}`;
const pathOf = (name) => `/v1/policies/${encodeURIComponent(name)}`;

let list = null;
let note = () => {};

/** The document that was put, out of the record. */
export const documentOf = ({ storage, match, keep, verified_only, trash, paused }) => ({ storage, match, keep,
	...(verified_only && { verified_only }), ...(trash && { trash }), ...(paused && { paused }) });

async function attempt(what, work) {
	try {
		return await work();
	} catch (error) {
		note(`Could not ${what}: ${error.message}`);
		return null;
	}
}

async function pause(name) {
	const policy = store.policies.find((p) => p.name === name), doc = policy && { ...documentOf(policy), paused: false };
	if (!doc) return;
	if (policy.paused) {
		const shown = await attempt(`look at what ${name} would do`, () => post(`${pathOf(name)}:preview`, doc));
		if (!shown) return;
		const words = shown.remove.length ? `It removes ${shown.remove.length}, ${bytes(shown.remove_bytes)}, at once.`
			: "Nothing would go now.";
		if (!(await confirm(`Let policy ${name} go on?`, words, shown.remove.length ? "Yes, go on" : "Go on"))) return;
	}
	await attempt(policy.paused ? `let ${name} go on` : `pause ${name}`,
		() => call("PUT", pathOf(name), { ...doc, paused: !policy.paused, confirm: true }));
	refresh("policies");
}

async function remove(name) {
	if (!(await confirm(`Delete policy ${name}?`, "Checkpoints stay as they are; without another policy they stay for ever.",
		"Yes, delete it"))) return;
	await attempt(`delete ${name}`, () => call("DELETE", pathOf(name)));
	refresh("policies");
}

function next(p) {
	if (p.problem) return h("span", { class: "error" }, p.problem);
	if (!p.preview) return "–";
	const goes = p.preview.remove.filter((x) => x.policy === p.name);
	if (p.paused) return "nothing: it is paused";
	return goes.length ? `${goes.length}, ${bytes(goes.reduce((sum, x) => sum + x.bytes, 0))}` : "nothing now";
}

function card(p) {
	const s = p.status || {}, runs = runsOfPolicy(store.runs, p), mark = s.problem ? "warn" : p.paused ? "idle" : "ok";
	return h("article", { class: `card ${mark}`, "data-policy": p.name },
		h("div", { class: "card-head" }, h("h4", {}, h("a", { href: policyHref(p.name), "data-act": `policy-${p.name}` }, p.name)),
			state(mark, s.problem ? "held up" : p.paused ? "paused" : "active")),
		h("p", { class: "card-words" }, ruleWords(p)),
		h("p", { class: "small" }, h("bdi", { class: "mono" }, `${p.storage}:${p.match}`),
			` · ${runs.length} run${runs.length === 1 ? "" : "s"}, ${s.checkpoints ?? 0} checkpoints, ${bytes(s.bytes)}`),
		s.problem ? h("p", { class: "error" }, s.problem) : null,
		s.over_bytes ? h("p", { class: "error" }, `What must stay is more than the budget, by ${bytes(s.over_bytes)}.`) : null,
		h("dl", { class: "rows" }, [["Goes next", next(p)], ["Removed", s.removed ? `${s.removed}, ${bytes(s.removed_bytes)}`
			: "nothing yet"],
			["Trash", p.trash ? `for ${p.trash}` : "no: gone at once"], ["Last look", s.evaluated_at ? when(s.evaluated_at)
				: "not yet"]]
			.map(([k, v]) => h("div", { class: "row" }, h("dt", {}, k), h("dd", {}, v)))),
		s.failed ? h("p", { class: "small" }, chip(`${s.failed} removals failed`, "bad")) : null,
		h("div", { class: "tools" }, h("a", { class: "button", href: policyHref(p.name), "data-act": `edit-${p.name}` }, "Edit …"),
			button(p.paused ? "Go on …" : "Pause", `pause-${p.name}`, () => pause(p.name),
				{ "aria-label": `${p.paused ? "Go on with" : "Pause"} ${p.name}` }),
			button("Delete …", `remove-${p.name}`, () => remove(p.name), { "aria-label": `Delete ${p.name}` })));
}

export function draw() {
	const bare = store.runs.filter((run) => !store.policies.some((p) => runsOfPolicy([run], p).length));
	sync(list, [store.policies.length ? h("div", { class: "cards" }, store.policies.map(card))
		: h("div", { class: "panel" }, h("p", {}, "There is no policy: all checkpoints stay.")),
	store.policies.length && bare.length ? h("section", { class: "panel", "aria-label": "Without a policy" },
		h("h3", {}, "Without a policy"),
		h("p", { class: "small" }, "All checkpoints of these runs stay."),
		fact(bare.slice(0, 20).map((run) => [h("a",
			{ href: policyHref("+", `?${new URLSearchParams({ storage: run.storage, match: run.run })}`),
			"data-act": `for-${run.storage}:${run.run}` }, h("bdi", {}, `${run.storage}:${run.run}`)),
			`${run.checkpoints} checkpoint${run.checkpoints === 1 ? "" : "s"}, ${bytes(run.bytes)}`]))) : null]);
}

export function mount(root, route, page) {
	note = page.note;
	list = h("div", { id: "policies", class: "stack" });
	fill(root, [h("h2", { id: "h-policies", tabindex: "-1" }, "Retention"),
		h("p", {}, "Policies say which checkpoints of a run stay, and when the others go. The newest durable one, the newest verified "
			+ "one, and what is held or has an alias never go."),
		h("div", { class: "item-head" }, h("h3", {}, "Policies"), h("a", { class: "button", href: policyHref("+"),
			"data-act": "new-policy" }, "New policy …")), list]);
	refresh("policies");
}
