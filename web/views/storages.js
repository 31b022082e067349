// storages.js: where checkpoints live: state, space and when it is full, measured speed, tiers, and the trash.

import { checkpointPath, get, post } from "../api/api.js";
import { $, confirm, h, rows, sync } from "../widgets/dom.js";
import { bytes } from "../widgets/format.js";
import { button, meter, plainTable, state, table, when } from "../widgets/parts.js";
import { forecast, forecastWords } from "../store/health.js";
import { ENDED, refresh, store } from "../store/store.js";

const JOBS_MEASURED = 20;
const READS = new Set(["load", "verify", "stats", "diff"]);
const WRITES = new Set(["save", "reshard", "merge", "apply", "delta"]);

const trash = new Map();             // storage → what its trash holds, once it was asked for
let redraw = () => {};
let note = () => {};

export function storageState(s) {
	return s.state === "ok" && s.writable === false ? "read-only" : s.state || "unknown";
}

/** Bytes a second, the median of the last jobs that moved at least a mebibyte to or from the storage. */
export function measured(storage, writes) {
	const rates = [];
	for (const job of [...store.jobs.values()].reverse()) {
		const side = writes ? job.target : job.source || job.a, s = (Date.parse(job.finished_at) - Date.parse(job.started_at)) / 1000;
		if (job.state !== "succeeded" || side?.storage !== storage || !(writes ? WRITES : READS).has(job.kind)) continue;
		if (job.progress?.bytes_done >= 1 << 19 && s > 0.0005) rates.push(job.progress.bytes_done / s);
		if (rates.length === JOBS_MEASURED) break;
	}
	rates.sort((a, b) => a - b);
	return rates.length ? rates[Math.floor(rates.length / 2)] : null;
}

function lanes(storage) {
	const live = [...store.jobs.values()].filter((j) => !ENDED.has(j.state) && [j.source, j.target, j.a,
		j.b].some((r) => r?.storage === storage));
	const runs = live.filter((j) => j.state !== "queued").length;
	return live.length ? `${runs} run, ${live.length - runs} wait` : "idle";
}

function tier(t) {
	if (!t) return "–";
	return [state(t.state === "failing" ? "failed" : t.state, t.state), h("div", { class: "small" }, `to ${t.storage}`, t.waiting
		? ` · ${t.waiting} wait, ${bytes(t.bytes)}` : ""),
		t.error ? h("div", { class: "error" }, t.error.detail || t.error.code) : null];
}

async function openTrash(name) {
	try {
		trash.set(name, (await get(`/v1/storages/${encodeURIComponent(name)}/trash`)).trash || []);
	} catch (error) {
		note(`Cannot list the trash of ${name}: ${error.message}`);
	}
	redraw();
}

async function undelete(storage, one) {
	if (!(await confirm(`Bring back ${storage}:${one.name}?`, "It appears under its name again, as it was deleted.",
		"Yes, bring it back"))) return;
	try {
		await post(checkpointPath({ storage, name: one.name }, ":undelete"), { id: one.id });
	} catch (error) {
		note(`Could not bring back ${storage}:${one.name}: ${error.message}`);
	}
	refresh("checkpoints");
	refresh("runs");
	openTrash(storage);
}

function trashPanels() {
	return [...trash].map(([name, list]) => h("section", { class: "panel", id: `trash-${name}`, "aria-label": `Trash of ${name}` },
		h("h3", {}, `Trash of ${name}`),
		list.length === 0 ? h("p", { class: "quiet" }, "It is empty.")
			: plainTable(`trash-table-${name}`, `Trash of ${name}`, ["Checkpoint", ["Size", "num"], "Deleted", "Goes for good", "Why", "Action"],
				list.map((one) => [
				one.name || one.id, bytes(one.bytes), when(one.deleted_at), one.until ? h("time", { datetime: one.until },
					one.until.slice(0, 16).replace("T", " ")) : "–",
				one.policy ? `policy ${one.policy}: ${one.why}` : one.problem || "by hand",
				one.name ? button("Bring back", `undelete-${one.id}`, () => undelete(name, one), { "aria-label": `Bring back ${one.name}` })
					: null]))));
}

export function draw() {
	rows($("storages").tBodies[0], store.storages, (s) => s.name, (s) => {
		const used = s.total_bytes > 0 ? s.total_bytes - s.free_bytes : null, why = s.problem?.detail || s.problem?.title || s.error?.detail;
		const speed = (v) => (v ? `${bytes(v)}/s` : "–");
		return [
			h("th", { scope: "row", class: "name" }, h("b", { class: "mono" }, s.name), h("div", { class: "small mono" }, s.path || ""),
				h("div", { class: "small" }, [s.fs, s.direct_io ? "direct I/O" : null].filter(Boolean).join(", "))),
			h("td", {}, state(storageState(s)), why ? h("div", { class: "error" }, why) : null),
			h("td", { class: "space" }, used === null ? "–" : [meter(`Used space of ${s.name}`, used, s.total_bytes),
				h("div", { class: "small" }, `${bytes(s.free_bytes)} free of ${bytes(s.total_bytes)}`),
					h("div", { class: "small" }, forecastWords(forecast(store, s)))]),
			h("td", { class: "num" }, speed(measured(s.name, true))),
			h("td", { class: "num" }, speed(measured(s.name, false))),
			h("td", {}, lanes(s.name)),
			h("td", {}, tier(s.tier)),
			h("td", {}, s.trash ? button(s.trash.checkpoints ? `${s.trash.checkpoints}, ${bytes(s.trash.bytes)}` : "empty", `trash-${s.name}`,
				() => openTrash(s.name),
				{ class: "quiet-button", "aria-label": `Trash of ${s.name}` }) : "–"),
		];
	}, "No storage is configured.");
	sync($("trash"), trashPanels());
}

export function mount(root, route, page) {
	redraw = page.draw;
	note = page.note;
	root.append(h("h2", { id: "h-storages", tabindex: "-1" }, "Storages"),
		table("storages", "Storages table", ["Storage", "State", "Space", ["Writes", "num"], ["Reads", "num"], "Lane", "Tier", "File system",
			"Path", "Trash"]),
		h("p", { class: "small" }, "Speeds are medians of the last jobs that moved bytes there, from start to durable end."),
			h("div", { id: "trash" }));
}
