// app.js: what is shown when: the token, the connection, the views, the notices.

import { Problem, onRefused, setToken, takeToken } from "./api/api.js";
import { Stream } from "./api/events.js";
import { ENDED, apply, fetchJob, jobById, onChange, refresh, refreshAll, store, wants } from "./store/store.js";
import { $, fill, h, sync, text } from "./widgets/dom.js";
import { ago, seconds } from "./widgets/format.js";
import * as overview from "./views/overview.js";

const DRAW_MS = 100;
const REFRESH_MS = 10000;

/* Only the overview comes with the page; the others are fetched when they are opened, so that the first look is a small one. */
const later = (name) => () => import(`./views/${name}.js`);
const VIEWS = {
	"": async () => overview, runs: later("runs"), run: later("run"), jobs: later("jobs"), job: later("job"),
	checkpoints: later("checkpoints"), checkpoint: later("checkpoint"), reshard: later("reshard"), compare: later("compare"),
	policies: later("policies"), policy: later("policy"), automation: later("automation"), audit: later("audit"), nodes: later("nodes"),
	"state-dicts": later("memory"), storages: later("storages"), workers: later("workers"), doctor: later("doctor"),
};
const ONE = { runs: "run", jobs: "job", checkpoints: "checkpoint", policies: "policy" };
const NAV = { run: "runs", job: "jobs", checkpoint: "checkpoints", reshard: "checkpoints", policy: "policies" };

let stream = null;
let downSince = null;
let route = { view: "", id: "", filter: new URLSearchParams() };
let shown = null;                    // the module on show
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
	const number = (n) => String(n || "");
	text($("count-jobs"), active ? `${active} active` : "");
	text($("count-runs"), number(store.runs.length));
	text($("count-checkpoints"), number(store.runs.reduce((sum, run) => sum + run.checkpoints, 0)));
	text($("count-state-dicts"), number(store.stateDicts.length));
	text($("count-storages"), number(store.storages.length));
	text($("count-workers"), number(store.workers.length));
	$("nav-nodes").hidden = !store.nodes.node;
	text($("count-nodes"), number(store.nodes.nodes.length));
	text($("count-doctor"), number(store.warnings.length));
	const you = store.capabilities;
	$("who").hidden = !you;
	if (!you) return;
	const who = !you.token ? `uid ${you.uid}` : you.token === "token" ? "the daemon's token" : `token ${you.token}`;
	text($("who-words"), `${who}, ${{ read: "may read", submit: "may submit jobs" }[you.scope] || "admin"}`);
}

function drawNow() {
	if (!$("view-login").hidden) return;
	counts();
	notices();
	shown?.draw?.(route);
}

/* ---- notices ---- */

function notice(words, bad, button) {
	return h("div", { class: bad ? "notice bad" : "notice" }, h("span", {}, words), button || null);
}

function notices() {
	const list = [];
	if (downSince) {
		list.push(notice("The daemon does not answer. What is shown is from before; this page goes on by itself when it is back.",
			true,
			h("button", { type: "button", "data-act": "hurry", click: () => stream?.hurry() }, "Try now")));
	}
	for (const w of store.warnings) list.push(notice(`${w[0].toUpperCase()}${w.slice(1)}.`, true));
	for (const s of store.storages) {
		if (s.state === "stalled") list.push(notice(`Storage ${s.name} is stalled: it does not answer. Others go on.`, true));
		if (s.state === "unavailable") list.push(notice(`Storage ${s.name} is unavailable: ${s.problem?.detail || ""}`, true));
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
	$("who").hidden = true;
	store.capabilities = null;
	$("notices").replaceChildren();
	$("view").replaceChildren();
	shown = null;
	$("view-login").hidden = false;
	document.title = "dcpd";
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
	const parts = path.split("/"), filter = new URLSearchParams(query || ""), name = parts[0];
	try {
		const ids = parts.slice(1).filter(Boolean).map(decodeURIComponent);
		if (ids.length && ONE[name]) return { view: ONE[name], id: ids[0], rest: ids.slice(1), filter };
		if (ids.length && name === "reshard") return { view: name, id: ids[0], rest: [], filter };
	} catch {
		return { view: "", id: "", filter };
	}
	return { view: Object.hasOwn(VIEWS, name) && !Object.values(ONE).includes(name) && name !== "reshard" ? name : "", id: "", rest: [],
		filter };
}

async function show(focus) {
	if (!$("view-login").hidden) return;
	const before = route, module = shown;
	route = parse();
	const mine = route;
	for (const a of $("nav").querySelectorAll("a")) {
		const current = a.hash === `#/${NAV[route.view] ?? route.view}`;
		if (current) a.setAttribute("aria-current", "page");
		else a.removeAttribute("aria-current");
	}
	if (module && before.view === route.view && before.id === route.id && module.again?.(route)) {
		drawNow();
		return;
	}
	let next;
	try {
		next = await VIEWS[route.view]();
	} catch {
		if (mine === route) note("A part of the page could not be fetched; it is tried again when the view is opened again.");
		return;
	}
	if (mine !== route || !$("view-login").hidden) return;
	module?.leave?.();
	shown = next;
	wants(next.needs || []);
	$("tip").hidden = true;
	const section = h("section", { id: `view-${route.view || "overview"}`, "aria-labelledby": `h-${route.view || "overview"}` });
	fill($("view"), section);
	next.mount(section, route, { note, draw });
	document.title = `${next.title ? next.title(route) : section.querySelector("h2").textContent} – dcpd`;
	drawNow();
	if (focus) {
		section.querySelector("h2")?.focus();
		window.scrollTo(0, 0);
	}
}

function start() {
	onChange(draw, announce);
	onRefused(() => { if ($("view-login").hidden) login("The token was refused."); });
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
	$("who-leave").addEventListener("click", () => login("You have signed out of this tab."));
	window.addEventListener("online", () => stream?.hurry());
	document.querySelector(".skip").addEventListener("click", (event) => {
		event.preventDefault();
		$("main").focus();
	});
	setInterval(() => {
		for (const node of document.querySelectorAll("time[data-ago]")) text(node, ago(node.dateTime));
		for (const node of document.querySelectorAll("time[data-since]")) {
			text(node, seconds(Math.max(0, Math.round((Date.now() - Date.parse(node.dateTime)) / 1000))));
		}
	}, 1000);
	setInterval(() => {
		const lists = ["workers", "storages", "stateDicts", "deviceImages", "warnings", "runs", ...(store.nodes.node ? ["nodes"] : [])];
		if (stream && !downSince && !document.hidden) lists.forEach(refresh);
	}, REFRESH_MS);
	if (takeToken()) enter();
	else login("");
}

start();
