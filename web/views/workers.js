// workers.js: worker processes: what they do, what confines them, and with which engine they move bytes.

import { $, h, rows } from "../widgets/dom.js";
import { jobLink, state, table, when } from "../widgets/parts.js";
import { store } from "../store/store.js";

/** What holds a worker back from the rest of the machine; nothing is known before it has said hello. */
function sandbox(w) {
	if (w.state === "starting" || w.seccomp === undefined) return "–";
	const on = [{ landlock: "Landlock", mount_namespace: "mount namespace" }[w.sandbox], w.seccomp ? "seccomp" : null].filter(Boolean);
	return on.length === 2 ? on.join(", ") : h("span", { class: "error" }, on.length ? `${on[0]} only` : "none");
}

export function draw() {
	rows($("workers").tBodies[0], store.workers, (w) => String(w.id ?? w.pid), (w) => [
		h("th", { scope: "row", class: "mono" }, String(w.pid ?? w.id)),
		h("td", {}, w.role || "–"),
		h("td", {}, w.state ? state(w.state) : "–"),
		h("td", {}, w.job ? jobLink(w.job) : "–"),
		h("td", {}, (w.storages || []).join(", ") || "–"),
		h("td", {}, w.engine || "–"),
		h("td", {}, sandbox(w)),
		h("td", {}, when(w.started_at)),
	], "No worker is running.");
}

export function mount(root) {
	root.append(h("h2", { id: "h-workers", tabindex: "-1" }, "Workers"),
		table("workers", "Workers table", ["Process", "Role", "State", "Job", "Storages", "I/O engine", "Sandbox", "Since"]),
		h("p", { class: "small" }, "A gang runs jobs, a lookup answers questions about a storage, a probe asks whether one still answers."));
}
