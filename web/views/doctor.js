// doctor.js: what this host lacks, in words, and what to do about it.

import { h, sync } from "../widgets/dom.js";
import { bytes } from "../widgets/format.js";
import { state } from "../widgets/parts.js";
import { store } from "../store/store.js";

export const needs = ["capabilities", "doctor"];
let list = null;

/** [{mark: ok|warn|bad|idle, name, words, advice?}] of everything that the daemon tells of itself and, in /v1/doctor, of its host. */
export function findings() {
	const c = store.capabilities, out = [];
	const add = (mark, name, words, advice) => out.push({ mark, name, words, advice });
	for (const f of store.doctor?.findings || []) add(f.state, f.name, f.words, f.command);
	if (!store.doctor) for (const w of store.warnings) add("warn", "Daemon", w);
	if (!c) return out;
	if (c.host?.sandbox) add("ok", "Sandbox",
		`${c.host.sandbox}${c.host.seccomp ? ", seccomp" : ""}: what keeps workers to their storages and calls.`);
	for (const d of c.devices || []) add(d.problem ? "bad" : "ok", `GPU ${d.index}`, d.problem || `${d.name}, ${bytes(d.memory_bytes)}`);
	if (c.shm) {
		const full = c.shm.used_bytes / c.shm.limit_bytes;
		add(full > 0.9 ? "warn" : "ok", "Shared memory", `${bytes(c.shm.used_bytes)} of ${bytes(c.shm.limit_bytes)} in use.`, full > 0.9
			? "Delete state dicts that nobody needs, or raise --shm-limit." : "");
		if (c.shm.orphaned_bytes) add("warn", "Orphans", `${bytes(c.shm.orphaned_bytes)} belong to state dicts whose trainer is gone.`,
			"Save or delete them in Shared memory.");
	}
	const you = `you are uid ${c.uid}${c.admin ? ", an admin" : ""}`;
	add("ok", "Daemon", `dcpd ${c.version}, ${c.workers} workers a gang, ${c.kinds?.length} kinds of jobs; ${you}.`);
	return out;
}

const ORDER = ["bad", "warn", "idle", "ok"];
const WORDS = { bad: "fix this", warn: "lacking", idle: "not here", ok: "fine" };

export function draw() {
	const found = findings().sort((a, b) => ORDER.indexOf(a.mark) - ORDER.indexOf(b.mark));
	const wrong = found.filter((f) => f.mark === "bad" || f.mark === "warn").length;
	sync(list, [h("p", { class: "lead" }, !store.capabilities ? "Looking …" : wrong
		? `${wrong} ${wrong === 1 ? "thing is" : "things are"} worth a look.` : "This host lacks nothing that dcpd needs."),
		h("ul", { class: "findings" }, found.map((f) => h("li", { class: f.mark, "data-finding": f.name }, state(f.mark, WORDS[f.mark]),
			h("div", {}, h("b", {}, f.name), h("p", {}, f.words), f.advice ? h("p", { class: "advice" }, f.advice) : null))))]);
}

export function mount(root) {
	list = h("div", { id: "findings" });
	root.append(h("h2", { id: "h-doctor", tabindex: "-1" }, "Doctor"), list);
}
