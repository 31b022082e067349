// memory.js: state dicts in shared memory: who owns them, which slot of which rank holds which generation, and who reads it; and their
// images in the memory of GPUs.

import { call } from "../api/api.js";
import { $, confirm, h, rows, sync, tip } from "../widgets/dom.js";
import { bytes, seconds } from "../widgets/format.js";
import { button, jobLink, meter, panel, stat, state, table, when } from "../widgets/parts.js";
import { refresh, store } from "../store/store.js";

const CELLS_MAX = 512;
export const needs = ["capabilities", "deviceImages"];
let note = () => {};

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

const leaseLeft = (stamp) => (stamp ? Math.round((Date.parse(stamp) - Date.now()) / 1000) : null);

/** The shortest lease of all ranks, in words; without one the state dict stays until it is deleted. */
function lease(dict) {
	const left = (dict.ranks || []).map((r) => leaseLeft(r.lease_expires_at)).filter((s) => s !== null);
	if (dict.orphaned_at) return ["orphaned ", when(dict.orphaned_at)];
	if (left.length === 0) return "none";
	const least = Math.min(...left);
	return least > 0 ? `${seconds(least)} left` : "over";
}

async function remove(name) {
	const dict = store.stateDicts.find((d) => d.name === name);
	if (!(await confirm(`Delete shm:${name}?`, `Its segments, ${bytes(dict?.bytes)}, are gone for good; checkpoints saved from it stay.`,
		"Yes, delete it"))) return;
	try {
		await call("DELETE", `/v1/state-dicts/${encodeURIComponent(name)}`);
	} catch (error) {
		note(`Could not delete shm:${name}: ${error.message}`);
	}
	refresh("stateDicts");
}

const MARKS = { kept: "ok", filling: "busy", dropped: "warn", lost: "bad" };

async function drop(id) {
	const image = store.deviceImages.find((i) => i.id === id), { attached: n, state_dict: name, rank } = image || {};
	if (!image || !(await confirm(`Drop the device image of shm:${name}, rank ${rank}?`, n
		? `No engine gets it any more. ${n === 1 ? "The engine that has it keeps it" : `The ${n} engines that have it keep it`}; then its `
			+ `memory, ${bytes(image.bytes)}, is free.`
		: `Its memory, ${bytes(image.bytes)}, goes back to the GPU. The next engine gets it when it is kept again.`, "Yes, drop it"))) return;
	try {
		await call("DELETE", `/v1/device-images/${encodeURIComponent(id)}`);
	} catch (error) {
		note(`Could not drop device image ${id}: ${error.message}`);
	}
	refresh("deviceImages");
}

function drawImages() {
	$("device-memory").hidden = store.deviceImages.length === 0;
	rows($("device-images").tBodies[0], store.deviceImages, (i) => i.id, (i) => [
		h("th", { scope: "row", class: "mono" }, `shm:${i.state_dict}`, h("p", { class: "small" }, i.id)),
		h("td", { class: "num" }, i.rank),
		h("td", { class: "num" }, i.generation),
		h("td", { class: "name mono" }, i.device),
		h("td", { class: "num" }, bytes(i.bytes)),
		h("td", {}, state(MARKS[i.state], i.state), i.problem ? h("div", { class: "error" }, i.problem) : null),
		h("td", { class: "num" }, i.attached),
		h("td", { class: "nowrap" }, i.expires_at ? `in ${seconds(Math.max(0, leaseLeft(i.expires_at)))}` : "–"),
		h("td", {}, i.state === "kept" || i.state === "lost" ? button("Drop", `drop-image-${i.id}`, () => drop(i.id),
			{ "aria-label": `Drop device image ${i.id}`, class: "quiet-button" }) : "–"),
	], "None.");
}

/** The slots as a picture: a row for each rank, a cell for each slot. */
function slots(dict) {
	const ranks = dict.ranks || [];
	let cells = 0;
	return h("section", { class: "panel", id: `slots-${dict.name}`, "aria-label": `Slots of ${dict.name}` },
		h("h3", { class: "mono" }, `shm:${dict.name}`, h("span", { class: "small" }, ` uid ${dict.uid ?? "?"} · made `, when(dict.created_at))),
		h("ul", { class: "slots" }, ranks.map((r) => {
			if (cells > CELLS_MAX) return null;
			return h("li", {}, h("span", { class: "slot-rank" }, `rank ${r.rank}`), (r.slots || []).map((s) => {
				cells++;
				const words = `slot ${s.slot}: ${s.state}${s.generation >= 0 && s.state !== "free" ? `, generation ${s.generation}` : ""}`;
				const cell = h("span", { class: `slot ${s.state}${s.in_use_by?.length ? " used" : ""}${s.problem ? " bad" : ""}`, tabindex: "0",
					role: "img", "aria-label": words },
					s.state === "free" ? "free" : `g${s.generation}`);
				return tip(cell, () => [words, `${bytes(s.image_bytes || 0)} of ${bytes(s.bytes)}`, s.segment || "", s.in_use_by?.length
					? `read by ${s.in_use_by.join(", ")}` : "read by nobody"]);
			}), h("span", { class: "small" }, r.lease_expires_at
				? `lease ${leaseLeft(r.lease_expires_at) > 0 ? `${seconds(leaseLeft(r.lease_expires_at))} left` : "over"}` : ""));
		})),
		ranks.length && cells > CELLS_MAX ? h("p", { class: "small" }, `the first of ${ranks.length} ranks`) : null);
}

const inUse = (s) => `version ${s?.applied ?? "–"} in use${s?.lag_s > 0 ? `, ${seconds(s.lag_s)} behind` : ""}`;
const onNode = (node) => (node ? ` on node ${node}` : "");

/* What it is to others: a copy of a neighbour's, a publication and who subscribes to it, or a subscriber and how far behind it is. */
function role(d) {
	if (d.replica)
		return h("p", { class: "small" }, `copy of ${d.replica.storage}:${d.replica.name}, from node ${d.replica.from}`);
	if (d.publish)
		return [h("p", { class: "small" }, "publication"), ...(d.subscribers || []).map((s) => h("p", { class: "small" },
			`subscriber ${s.name}${onNode(s.node)}: ${inUse(s.subscription)}`))];
	if (!d.subscribe)
		return null;
	const s = d.subscription;
	return h("p", { class: "small" }, `subscribes to ${d.subscribe.publication}${onNode(d.subscribe.node)}: ${inUse(s)}`,
		s?.problem ? `; ${s.problem.code}: ${s.problem.detail ?? ""}` : "");
}

export function draw() {
	const shm = store.capabilities?.shm;
	sync($("memory-use"), shm ? [h("div", { class: "stats" }, stat("In use", bytes(shm.used_bytes)), stat("Free", bytes(shm.free_bytes)),
		stat("Limit", bytes(shm.limit_bytes)), stat("Orphaned", bytes(shm.orphaned_bytes))),
			meter("Used shared memory", shm.used_bytes, shm.limit_bytes)] : []);
	rows($("state-dicts").tBodies[0], store.stateDicts, (d) => d.name, (d) => {
		const all = (d.ranks || []).flatMap((r) => r.slots || []), users = [...new Set(all.flatMap((s) => s.in_use_by || []))];
		const memory = d.ranks ? all.reduce((sum, s) => sum + (s.bytes || 0), 0) : d.bytes, sealed = d.sealed_generation ?? sealedByAll(d);
		return [
			h("th", { scope: "row", class: "name mono" }, `shm:${d.name}`, role(d)),
			h("td", { class: "num" }, d.world_size ?? "–"),
			h("td", { class: "num" }, bytes(memory)),
			h("td", {}, sealed !== null && sealed !== undefined ? `generation ${sealed}` : d.ranks ? "no" : "–"),
			h("td", {}, d.ranks ? slotWords(all) : "–", badImages(all)),
			h("td", {}, lease(d)),
			h("td", {}, users.length ? users.map((id) => h("div", {}, jobLink(id))) : "–"),
			h("td", {}, button("Delete", `drop-${d.name}`, () => remove(d.name), { "aria-label": `Delete ${d.name}`, class: "quiet-button" })),
		];
	}, "No state dict is in shared memory.");
	drawImages();
	sync($("memory-slots"), store.stateDicts.filter((d) => d.ranks?.length).slice(0, 12).map(slots));
}

export function mount(root, route, page) {
	note = page.note;
	root.append(h("h2", { id: "h-state-dicts", tabindex: "-1" }, "State dicts in shared memory"),
		panel("Shared memory of this host", h("div", { id: "memory-use" })),
		table("state-dicts", "State dicts table", ["State dict", ["World size", "num"], ["Memory", "num"], "Sealed by all", "Slots", "Lease",
			"Used by", "Action"]),
		h("section", { id: "device-memory", class: "panel", "aria-label": "Device images", hidden: true },
			h("h3", {}, "Kept in the memory of GPUs"),
			table("device-images", "Device images table", ["State dict", ["Rank", "num"], ["Generation", "num"], "Device", ["Size", "num"], "State",
				["Engines", "num"], "Expires", "Action"])),
		h("div", { id: "memory-slots", class: "cards" }));
}
