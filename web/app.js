// app.js: what is shown when: the token, the connection, the views, the notices.

import { Problem, setToken, takeToken } from "./api.js";
import { $, h, sync, text } from "./dom.js";
import { Stream } from "./events.js";
import { ago } from "./format.js";
import { drawJob, drawJobs, filterJobs, initJobs } from "./jobs.js";
import { drawCheckpoints, drawStateDicts, drawStorages, drawWorkers, filterCheckpoints, initLists } from "./lists.js";
import { ENDED, apply, fetchJob, jobById, onChange, refresh, refreshAll, store } from "./store.js";
import { drawTensors, initTensors, openTensors } from "./tensors.js";

const DRAW_MS = 100;
const REFRESH_MS = 10000;
const VIEWS = { jobs: drawJobs, checkpoints: drawCheckpoints, "state-dicts": drawStateDicts, storages: drawStorages,
	workers: drawWorkers, tensors: drawTensors };
const FILTERS = { jobs: filterJobs, checkpoints: filterCheckpoints };

let stream = null;
let downSince = null;
let route = { view: "jobs", id: "", filter: null };
const notes = new Map();             // dismissible messages: what happened while one looked

/* ---- drawing: at most ten times a second, however many events come ---- */

let drawing = false;

function draw() {
	if (drawing) return;
	drawing = true;
	setTimeout(() => {
		drawing = false;
		drawNow();
	}, DRAW_MS);
}

function counts() {
	let active = 0;
	for (const job of store.jobs.values()) if (!ENDED.has(job.state)) active++;
	text($("count-jobs"), active ? `${active} active` : "");
	text($("count-checkpoints"), String(store.checkpoints.length || ""));
	text($("count-state-dicts"), String(store.stateDicts.length || ""));
	text($("count-storages"), String(store.storages.length || ""));
	text($("count-workers"), String(store.workers.length || ""));
}

function drawNow() {
	if (!$("view-login").hidden) return;
	counts();
	notices();
	if (route.view === "job") drawJob(route.id);
	else VIEWS[route.view]();
}

/* ---- notices ---- */

function notice(words, bad, button) {
	return h("div", { class: bad ? "notice bad" : "notice" }, h("span", {}, words), button || null);
}

function notices() {
	const list = [];
	if (downSince) {
		list.push(notice("The daemon does not answer. What is shown is from before; this page goes on by itself when it is back.", true,
			h("button", { type: "button", "data-act": "hurry", click: () => stream?.hurry() }, "Try now")));
	}
	for (const w of store.warnings) list.push(notice(`${w[0].toUpperCase()}${w.slice(1)}.`, true));
	for (const s of store.storages) {
		if (s.state === "stalled") list.push(notice(`Storage ${s.name} is stalled: it does not answer. Others go on.`, true));
		if (s.state === "gone") list.push(notice(`Storage ${s.name} is gone: its directory cannot be opened.`, true));
	}
	if (!downSince) for (const [what, why] of store.failed) list.push(notice(`Cannot list ${what}: ${why}`, false));
	for (const [key, words] of notes) {
		list.push(notice(words, true, h("button", { type: "button", "data-act": `close-${key}`, click: () => {
			notes.delete(key);
			draw();
		} }, "Dismiss")));
	}
	sync($("notices"), list);
}

let noteCount = 0;

function note(words) {
	for (const key of [...notes.keys()].slice(0, -4)) notes.delete(key);
	notes.set(++noteCount, words);
	draw();
}

function announce(job) {
	text($("announce"), `Job ${job.id}, ${job.kind}: ${job.state}`);
}

/* ---- the connection ---- */

function connection(state, words) {
	$("connection").dataset.state = state;
	text($("connection"), words);
}

function onEvent(event) {
	const data = apply(event);
	if (event.type === "worker.lost") {
		const job = data?.job ? `, with job ${data.job}` : "";
		note(`Worker process ${data?.pid ?? "?"} was lost${data?.signal ? ` (signal ${data.signal})` : ""}${job}.`);
	}
}

async function onOpen() {
	connection("live", "Live");
	downSince = null;
	notes.delete("down");
	draw();
	try {
		await refreshAll();
		if (route.view === "job" && !jobById(route.id)) await fetchJob(route.id);
	} catch (error) {
		if (error instanceof Problem && error.status === 401) login("The token was refused.");
		else note(`The lists could not be read: ${error.message}`);
	}
}

function onDown(words) {
	if (!downSince) downSince = new Date();
	connection("down", `Not connected: ${words}`);
	draw();
}

function connect() {
	stream?.stop();
	connection("connecting", "Connecting");
	stream = new Stream("/v1/events", {
		open: onOpen,
		event: onEvent,
		down: onDown,
		refused: (problem) => login(problem.status === 401 ? "The token was refused." : problem.message),
	});
	stream.start();
}

/* ---- the token ---- */

function login(why) {
	stream?.stop();
	stream = null;
	setToken("");
	connection("off", "Not connected");
	if (why) text($("login-why"), `${why} It is in the file token of the daemon's state directory.`);
	$("nav").hidden = true;
	$("notices").replaceChildren();
	document.querySelectorAll("main > section").forEach((s) => { s.hidden = s.id !== "view-login"; });
	$("token").focus();
}

function enter() {
	$("nav").hidden = false;
	$("view-login").hidden = true;
	connect();
	show(false);
}

/* ---- views ---- */

function parse() {
	const [path, query] = location.hash.replace(/^#\/?/, "").split("?", 2);
	const parts = path.split("/"), filter = new URLSearchParams(query || "");
	const one = { jobs: "job", checkpoints: "tensors" }[parts[0]];
	if (one && parts[1]) {
		try {
			return { view: one, id: decodeURIComponent(parts[1]), filter };
		} catch {
			return { view: parts[0], id: "", filter };
		}
	}
	return { view: Object.hasOwn(VIEWS, parts[0]) ? parts[0] : "jobs", id: "", filter };
}

function show(focus) {
	if (!$("view-login").hidden) return;
	route = parse();
	FILTERS[route.view]?.(route.filter);
	document.querySelectorAll("main > section").forEach((s) => { s.hidden = s.id !== `view-${route.view}`; });
	for (const a of $("nav").querySelectorAll("a")) {
		const current = a.hash === `#/${{ job: "jobs", tensors: "checkpoints" }[route.view] || route.view}`;
		if (current) a.setAttribute("aria-current", "page");
		else a.removeAttribute("aria-current");
	}
	const titles = { job: `Job ${route.id}`, tensors: `Tensors of ${route.id}` };
	document.title = `${titles[route.view] || $(`h-${route.view}`).textContent} – dcpd`;
	if (route.view === "job" && stream) fetchJob(route.id);
	if (route.view === "tensors") openTensors(route.id);
	drawNow();
	if (focus) $(`h-${route.view}`).focus();
}

function start() {
	onChange(draw, announce);
	initJobs(note, draw);
	initLists(draw);
	initTensors(draw);
	$("login").addEventListener("submit", (event) => {
		event.preventDefault();
		const value = $("token").value.trim();
		$("token").value = "";
		if (!value) return;
		setToken(value);
		enter();
	});
	window.addEventListener("hashchange", () => {
		if (location.hash.includes("token=")) {
			takeToken();
			enter();
		} else if (location.hash !== "#main") {
			show(true);
		}
	});
	window.addEventListener("online", () => stream?.hurry());
	setInterval(() => {
		for (const node of document.querySelectorAll("time[data-ago]")) text(node, ago(node.dateTime));
	}, 5000);
	setInterval(() => {
		if (stream && !downSince && !document.hidden) ["workers", "storages", "stateDicts", "warnings"].forEach(refresh);
	}, REFRESH_MS);
	if (takeToken()) enter();
	else login("");
}

start();
