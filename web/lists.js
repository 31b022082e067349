// lists.js: checkpoints, state dicts, storages and workers: tables of what the daemon last said.

import { $, h, pager, remember, rows } from "./dom.js";
import { bytes } from "./format.js";
import { state, when } from "./jobs.js";
import { store } from "./store.js";

const PAGE = 100;
const pages = {};
let filter = "";
let redraw = () => {};

function table(id, items, key, build, empty, word) {
	const last = Math.max(0, Math.ceil(items.length / PAGE) - 1);
	const page = Math.min(pages[id] || 0, last);
	rows($(id).tBodies[0], items.slice(page * PAGE, (page + 1) * PAGE), key, build, empty);
	pager($(`${id}-pager`), { page, size: PAGE, total: items.length, more: false, word,
		go: (to) => {
			pages[id] = to;
			if (id === "checkpoints") remember(id, filterWords());
			redraw();
		} });
}

const filterWords = () => ({ text: $("checkpoints-text").value.trim(), page: pages.checkpoints ? String(pages.checkpoints + 1) : "" });

/** Filters the list of checkpoints as the address says. */
export function filterCheckpoints(query) {
	$("checkpoints-text").value = query.get("text") || "";
	filter = $("checkpoints-text").value.trim().toLowerCase();
	pages.checkpoints = Math.max(0, (Number.parseInt(query.get("page"), 10) || 1) - 1);
}

function link(id) {
	if (!id) return "–";
	return h("a", { class: "mono", href: `#/jobs/${encodeURIComponent(id)}`, "data-act": `job-${id}` }, id);
}

/** What is known of a checkpoint's bytes, since when, and which job found it out. */
function verified(v) {
	if (!v) return "–";
	const count = v.damage_count > 1 ? ` · ${v.damage_count} places` : "";
	return [state(v.state), h("div", { class: "small" }, `${v.level}${count} · `, when(v.at), " · ",
		h("a", { href: `#/jobs/${encodeURIComponent(v.job)}`, "data-act": `verified-${v.job}` }, "job"))];
}

export function drawCheckpoints() {
	const words = (c) => `${c.storage}:${c.name} ${c.format} ${c.verified?.state || ""}`.toLowerCase();
	const found = store.checkpoints.filter((c) => words(c).includes(filter));
	table("checkpoints", found, (c) => `${c.storage}:${c.name}`, (c) => [
		h("th", { scope: "row", class: "name mono" }, h("a", { href: `#/checkpoints/${encodeURIComponent(`${c.storage}:${c.name}`)}`,
			"data-act": `tensors-${c.storage}:${c.name}` }, `${c.storage}:${c.name}`)),
		h("td", {}, c.format || "–"),
		h("td", { class: "num" }, bytes(c.bytes)),
		h("td", { class: "num" }, c.world_size ?? "–"),
		h("td", {}, when(c.modified_at)),
		h("td", {}, c.dcpd === true ? "dcpd" : c.dcpd === false ? "other" : "–"),
		h("td", {}, verified(c.verified)),
	], filter ? "No checkpoint matches." : "No checkpoints yet.", "checkpoints");
}

/** Newest generation that every rank sealed, or null. */
function sealedByAll(dict) {
	const ranks = dict.ranks || [];
	if (ranks.length === 0 || ranks.length < dict.world_size) return null;
	const sealed = ranks.map((r) => (r.slots || []).filter((s) => s.state === "sealed").map((s) => s.generation));
	const common = sealed[0].filter((g) => sealed.every((list) => list.includes(g)));
	return common.length ? Math.max(...common) : null;
}

function slotWords(slots) {
	const count = {};
	for (const slot of slots) count[slot.state] = (count[slot.state] || 0) + 1;
	return Object.entries(count).map(([k, n]) => `${n} ${k}`).join(", ") || "none";
}

/** Tells of sealed slots that hold no valid image: a save of them fails. */
function badImages(slots) {
	const bad = slots.filter((slot) => slot.problem);
	if (bad.length === 0) return null;
	const first = bad[0].problem, more = bad.length > 1 ? `, and ${bad.length - 1} more` : "";
	return h("div", { class: "error" }, `rank ${first.rank}, generation ${bad[0].generation}: ${first.detail || first.code}${more}`);
}

export function drawStateDicts() {
	table("state-dicts", store.stateDicts, (d) => d.name, (d) => {
		const slots = (d.ranks || []).flatMap((r) => r.slots || []);
		const users = [...new Set(slots.flatMap((s) => s.in_use_by || []))];
		const memory = d.ranks ? slots.reduce((sum, s) => sum + (s.bytes || 0), 0) : d.bytes;
		const sealed = d.sealed_generation ?? sealedByAll(d);
		return [
			h("th", { scope: "row", class: "name mono" }, `shm:${d.name}`,
				d.orphaned_at ? h("div", { class: "small" }, "orphaned ", when(d.orphaned_at)) : null),
			h("td", { class: "num" }, d.world_size ?? "–"),
			h("td", { class: "num" }, bytes(memory)),
			h("td", {}, sealed !== null && sealed !== undefined ? `generation ${sealed}` : d.ranks ? "no" : "–"),
			h("td", {}, d.ranks ? slotWords(slots) : "–", badImages(slots)),
			h("td", {}, users.length ? users.map((id) => h("div", {}, link(id))) : "–"),
		];
	}, "No state dict is in shared memory.", "state dicts");
}

function storageState(s) {
	return s.state === "ok" && s.writable === false ? "read-only" : s.state || "unknown";
}

export function drawStorages() {
	table("storages", store.storages, (s) => s.name, (s) => {
		const used = s.total_bytes > 0 ? (100 * (s.total_bytes - s.free_bytes)) / s.total_bytes : null;
		const why = s.problem?.detail || s.problem?.title || s.error?.detail;
		return [
			h("th", { scope: "row", class: "mono" }, s.name),
			h("td", {}, state(storageState(s)), why ? h("div", { class: "error" }, why) : null),
			h("td", {}, used === null ? "–" : [
				h("progress", { max: 100, value: used.toFixed(1), "aria-label": `Used space of ${s.name}` }),
				h("div", { class: "small" }, `${bytes(s.free_bytes)} free of ${bytes(s.total_bytes)}`)]),
			h("td", {}, s.fs || "–"),
			h("td", { class: "name mono" }, s.path || "–"),
		];
	}, "No storage is configured.", "storages");
}

/** What holds a worker back from the rest of the machine; nothing is known before it has said hello. */
function sandbox(w) {
	if (w.state === "starting" || w.seccomp === undefined) return "–";
	const on = [{ landlock: "Landlock", mount_namespace: "mount namespace" }[w.sandbox], w.seccomp ? "seccomp" : null].filter(Boolean);
	return on.length === 2 ? on.join(", ") : h("span", { class: "error" }, on.length ? `${on[0]} only` : "none");
}

export function drawWorkers() {
	table("workers", store.workers, (w) => String(w.id ?? w.pid), (w) => [
		h("th", { scope: "row", class: "mono" }, String(w.pid ?? w.id)),
		h("td", {}, w.role || "–"),
		h("td", {}, w.state ? state(w.state) : "–"),
		h("td", {}, link(w.job)),
		h("td", {}, (w.storages || []).join(", ") || "–"),
		h("td", {}, w.engine || "–"),
		h("td", {}, sandbox(w)),
		h("td", {}, when(w.started_at)),
	], "No worker is running.", "workers");
}

export function initLists(draw) {
	redraw = draw;
	const input = $("checkpoints-text");
	input.form.addEventListener("submit", (event) => event.preventDefault());
	input.addEventListener("input", () => {
		filter = input.value.trim().toLowerCase();
		pages.checkpoints = 0;
		remember("checkpoints", filterWords());
		draw();
	});
}
