// storages.js: where checkpoints live: state, space and when it is full, measured speed, tiers, and the trash.

import { checkpointPath, get, post } from "../api/api.js";
import { $, confirm, h, rows, sync } from "../widgets/dom.js";
import { bytes, seconds } from "../widgets/format.js";
import { plot } from "../widgets/chart.js";
import { button, meter, plainTable, state, table, when } from "../widgets/parts.js";
import { forecast, forecastWords } from "../store/health.js";
import { ENDED, refresh, store } from "../store/store.js";

const STORAGES_MEASURED = 16;
const MINUTES_LATELY = 5;
const MEASURE_MS = 10000;

const trash = new Map();             // storage → what its trash holds, once it was asked for
let redraw = () => {};
let note = () => {};

export function storageState(s) {
	return s.state === "ok" && s.writable === false ? "read-only" : s.state || "unknown";
}

/* ---- measured speed ---- */

const measured = new Map();          // storage → {stages, minutes}, as the daemon measured them
const asked = new Set();
let timer = 0;

async function measure() {
	await Promise.all(store.storages.slice(0, STORAGES_MEASURED).map(async ({ name }) => {
		const got = await get(`/v1/storages/${encodeURIComponent(name)}`).catch(() => null);
		if (got?.io) measured.set(name, got.io);
	}));
	redraw();
}

const rate = (m) => (m && m.seconds > 0 ? m.bytes / m.seconds : null);
const speed = (v) => (v ? `${bytes(v)}/s` : "–");

/** Bytes and seconds of the last minutes with traffic, in one direction. */
function lately(name, way) {
	const list = (measured.get(name)?.minutes || []).filter((m) => m[way]).slice(-MINUTES_LATELY);
	return rate({ bytes: list.reduce((sum, m) => sum + m[way].bytes, 0), seconds: list.reduce((sum, m) => sum + m[way].seconds, 0) });
}

const clock = (at) => new Date(at).toTimeString().slice(0, 5);

function overTime(name, way, words) {
	const points = (measured.get(name).minutes || []).filter((m) => m[way]?.seconds > 0).map((m) => ({ x: Date.parse(m.at),
		y: rate(m[way]),
		words: [`${clock(m.at)}: ${speed(rate(m[way]))}`, `${bytes(m[way].bytes)} in ${seconds(m[way].seconds)} of jobs' time`] }));
	return h("div", {}, h("h4", {}, words), plot(points, { label: `${words} of ${name} by minute`, y: (v) => `${bytes(v)}/s`, x: clock,
		bars: true,
		binary: true, height: 150, empty: "No traffic in the last six hours." }));
}

function speedPanels() {
	return store.storages.filter((s) => measured.get(s.name)?.stages.length).map((s) => {
		const io = measured.get(s.name), cells = (m) => [m ? bytes(m.bytes) : "–", m ? seconds(m.seconds) : "–", speed(rate(m))];
		return h("section", { class: "panel", id: `speed-${s.name}`, "aria-label": `Speed of ${s.name}` },
			h("h3", {}, `Speed of ${s.name}`),
			h("div", { class: "columns" }, overTime(s.name, "write", "Writes"), overTime(s.name, "read", "Reads")),
			h("details", { id: `stages-${s.name}` }, h("summary", {}, "By stage, since the daemon started"),
				plainTable(`stages-table-${s.name}`, `Bytes and time by stage of ${s.name}`, ["Stage", ["Written", "num"],
					["in", "num"], ["Speed", "num"],
					["Read", "num"], ["in", "num"], ["Speed", "num"]], io.stages.map((x) => [x.stage, ...cells(x.write),
						...cells(x.read)]))));
	});
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
		? ` · ${t.waiting} wait, ${bytes(t.bytes)}, the oldest for ${seconds(Math.round(t.seconds))}` : " · all is copied",
	t.skipped ? ` · ${t.skipped} superseded before they were copied` : ""),
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
			: plainTable(`trash-table-${name}`, `Trash of ${name}`, ["Checkpoint", ["Size", "num"], "Deleted", "Goes for good",
				"Why", "Action"],
				list.map((one) => [
				one.name || one.id, bytes(one.bytes), when(one.deleted_at), one.until ? h("time", { datetime: one.until },
					one.until.slice(0, 16).replace("T", " ")) : "–",
				one.policy ? `policy ${one.policy}: ${one.why}` : one.problem || "by hand",
				one.name ? button("Bring back", `undelete-${one.id}`, () => undelete(name, one),
					{ "aria-label": `Bring back ${one.name}` })
					: null]))));
}

export function draw() {
	if (store.storages.some((s) => !asked.has(s.name))) {
		store.storages.forEach((s) => asked.add(s.name));
		measure();
	}
	rows($("storages").tBodies[0], store.storages, (s) => s.name, (s) => {
		const used = s.total_bytes > 0 ? s.total_bytes - s.free_bytes : null, why = s.problem?.detail || s.problem?.title
			|| s.error?.detail;
		return [
			h("th", { scope: "row", class: "name" }, h("b", { class: "mono" }, s.name), h("div", { class: "small mono" },
				s.path || ""),
				h("div", { class: "small" }, [s.fs, s.direct_io ? "direct I/O" : null].filter(Boolean).join(", "))),
			h("td", {}, state(storageState(s)), why ? h("div", { class: "error" }, why) : null),
			h("td", { class: "space" }, used === null ? "–" : [meter(`Used space of ${s.name}`, used, s.total_bytes),
				h("div", { class: "small" }, `${bytes(s.free_bytes)} free of ${bytes(s.total_bytes)}`),
					h("div", { class: "small" }, forecastWords(forecast(store, s)))]),
			h("td", { class: "num" }, speed(lately(s.name, "write"))),
			h("td", { class: "num" }, speed(lately(s.name, "read"))),
			h("td", {}, lanes(s.name)),
			h("td", {}, tier(s.tier)),
			h("td", {}, s.trash ? button(s.trash.checkpoints ? `${s.trash.checkpoints}, ${bytes(s.trash.bytes)}` : "empty",
				`trash-${s.name}`,
				() => openTrash(s.name),
				{ class: "quiet-button", "aria-label": `Trash of ${s.name}` }) : "–"),
		];
	}, "No storage is configured.");
	sync($("trash"), trashPanels());
	sync($("speeds"), speedPanels());
}

export function mount(root, route, page) {
	redraw = page.draw;
	note = page.note;
	root.append(h("h2", { id: "h-storages", tabindex: "-1" }, "Storages"),
		table("storages", "Storages table", ["Storage", "State", "Space", ["Writes", "num"], ["Reads", "num"], "Lane", "Tier",
			"Trash"]),
		h("p", { class: "small" },
			"Speeds are what the daemon measured in the last five minutes with traffic: bytes by the time that jobs took to move them."),
		h("div", { id: "trash" }), h("div", { id: "speeds", class: "stack" }));
	asked.clear();
	timer = setInterval(() => { if (!document.hidden) measure(); }, MEASURE_MS);
}

export function leave() {
	clearInterval(timer);
}
