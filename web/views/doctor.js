// doctor.js: what this host lacks, in words, and what to do about it.

import { h, sync } from "../widgets/dom.js";
import { bytes } from "../widgets/format.js";
import { state } from "../widgets/parts.js";
import { store } from "../store/store.js";
import { storageState } from "./storages.js";

export const needs = ["capabilities"];
let list = null;

/** [{mark: ok|warn|bad|idle, name, words, advice?}] of everything that the daemon tells about itself and its host. */
export function findings() {
	const c = store.capabilities, out = [];
	const add = (mark, name, words, advice) => out.push({ mark, name, words, advice });
	for (const w of store.warnings) add("warn", "Daemon", w);
	if (!c) return out;
	const host = c.host || {};
	if (host.engine === "io_uring") add("ok", "I/O engine", "io_uring: files are read and written without a copy in between.");
	else if (host.engine) add("warn", "I/O engine", `${host.engine}: io_uring is refused here, so that saves and loads are slower.`,
		"In a container, run with deploy's seccomp profile, which allows io_uring; on a host, see kernel.io_uring_disabled.");
	else add("idle", "I/O engine", "Not known before the first worker has started: run any job.");
	if (host.sandbox === "landlock") add("ok", "Sandbox",
		`Landlock${host.landlock ? ` (ABI ${host.landlock})` : ""}: workers reach nothing but the storages.`);
	else if (host.sandbox === "mount_namespace") add("ok", "Sandbox",
		"A mount namespace: workers reach nothing but the storages. The kernel has no Landlock.");
	else if (host.sandbox === "none") add("bad", "Sandbox",
		"Workers are not confined to the storages: a hostile file that took over a worker could read others.",
			"Use a kernel with Landlock (5.13 or newer, with it among lsm=).");
	if (host.seccomp === true) add("ok", "System calls", "seccomp: workers can make only the calls that they need.");
	else if (host.seccomp === false) add("warn", "System calls", "Workers run without seccomp.", "Build with libseccomp.");
	for (const s of store.storages) {
		const word = storageState(s), name = `Storage ${s.name}`;
		if (word !== "ok") {
			add(word === "unknown" ? "idle" : "bad", name, { stalled: "It does not answer: jobs on it wait, others go on.",
				gone: "Its directory cannot be opened.",
				"read-only": "It cannot be written to.", unknown: "It has not been looked at yet." }[word] || word, word === "unknown" ? ""
					: `Look at ${s.path}.`);
			continue;
		}
		const lacks = [s.direct_io === false ? "O_DIRECT (bytes go through the page cache)" : null, s.exchange === false
			? "atomic exchange (an overwrite has a moment without either)" : null,
			s.rename_noreplace === false ? "rename without replacing" : null].filter(Boolean);
		add(lacks.length ? "warn" : "ok", name, lacks.length ? `${s.fs} lacks ${lacks.join(", ")}.`
			: `${s.fs}, with all that a commit needs; ${bytes(s.free_bytes)} free.`);
	}
	for (const [name, b] of Object.entries(c.backends || {})) {
		const words = { shm: "Shared memory between ranks", tcp: "TCP between hosts", cuda: "CUDA: copies to devices, pinned memory",
			nccl: "NCCL between GPUs" }[name] || name;
		add(b.available ? "ok" : "idle", name.toUpperCase(), b.available ? `${words}${b.version ? ` (${b.version})` : ""}.`
			: `${words}: not here. ${b.reason || ""}`);
	}
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
