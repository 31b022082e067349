// overview.js: is the training safe, what would a crash cost, what is wrong, and how long the space lasts.

import { failures, forecast, forecastWords, lastPart, problemsOf, retentionOf, runHref, savesOf, verdictOf } from "../store/health.js";
import { ENDED, jobsInOrder, store } from "../store/store.js";
import { fill, h, sync } from "../widgets/dom.js";
import { bytes, seconds, what } from "../widgets/format.js";
import { bar, chip, checkpointHref, errorLine, jobLink, meter, numbers, since, state, when } from "../widgets/parts.js";
import { spark } from "../widgets/chart.js";

const RUNS_SHOWN = 12;
const SAVES_SHOWN = 16;
const JOBS_SHOWN = 6;
const PROBLEMS_SHOWN = 8;
export const needs = ["policies", "capabilities"];
export const title = () => "Overview";

let parts = null;

export function mount(root) {
	const head = (id, words) => h("h3", { id }, words);
	parts = { verdict: h("div", { id: "verdict", "aria-live": "polite" }), runs: h("div", { id: "run-cards", class: "cards" }),
		host: h("div", { id: "host-cards", class: "cards small-cards" }), work: h("div", { id: "activity", class: "columns work" }) };
	fill(root, [h("h2", { id: "h-overview", class: "unseen", tabindex: "-1" }, "Overview"), parts.verdict,
		head("h-runs-now", "Runs"), parts.runs, head("h-work", "Jobs"), parts.work, head("h-host", "Space"), parts.host]);
}

const WORDS = { safe: "Safe", idle: "Safe, not training", late: "Look at it", bad: "At risk", unknown: "Not looked at" };
const MARKS = { safe: "ok", idle: "ok", late: "warn", bad: "bad", unknown: "idle" };

function verdict() {
	if (store.runs.length === 0 && !store.capabilities) return h("div", { class: "verdict idle" },
		h("p", { class: "verdict-words" }, "Looking …"));
	const list = problemsOf(store), bad = list.filter((p) => p.bad).length;
	const looked = store.runs.filter((run) => run.more);
	const safe = looked.filter((run) => ["safe", "idle"].includes(verdictOf(store, run).state)).length;
	const words = list.length === 0
		? store.runs.length ? `All is well: ${safe === 1 ? "the run is" : `all ${safe} runs are`} safe.` : "All is well. No run has saved yet."
		: bad ? `${bad} ${bad === 1 ? "thing needs" : "things need"} you.`
			: `${list.length} ${list.length === 1 ? "thing" : "things"} to look at.`;
	const runWords = looked.length ? `${safe} of ${looked.length} run${looked.length === 1 ? "" : "s"} safe` : "";
	return h("div", { class: `verdict ${bad ? "bad" : list.length ? "warn" : "ok"}` },
		h("p", { class: "verdict-words" }, words, list.length ? h("span", { class: "verdict-sub" }, runWords) : null),
		list.length ? h("ul", { class: "problems" }, list.slice(0, PROBLEMS_SHOWN).map((p, i) => h("li", { class: p.bad ? "bad" : "warn" },
			h("a", { href: p.href, "data-act": `problem-${i}` }, p.words), " ", h("span", {}, p.detail)))) : null,
		list.length > PROBLEMS_SHOWN ? h("p", { class: "small" }, `and ${list.length - PROBLEMS_SHOWN} more`) : null);
}

const secondsBetween = (a, b) => (a && b ? (Date.parse(b) - Date.parse(a)) / 1000 : null);

/** Stall, lag and throughput of the last saves. The stall is measured by the daemon from the first reserved slot to the last seal. */
function trends(run) {
	const saves = savesOf(run).filter((j) => j.state === "succeeded").slice(-SAVES_SHOWN);
	const measured = [...(run.more?.save_interval?.last || [])].reverse();
	const short = (s) => seconds(s);
	if (saves.length === 0 && measured.length === 0) return null;
	return h("div", { class: "trends" },
		spark("Stall", measured.map((m) => m.stall_s), short),
		spark("Lag", saves.map((j) => secondsBetween(j.milestones?.snapshotted, j.milestones?.durable)), short),
		spark("Throughput", saves.map((j) => {
			const s = secondsBetween(j.started_at, j.finished_at);
			return s > 0.0005 && j.progress?.bytes_done > 0 ? j.progress.bytes_done / s : null;
		}), (v) => `${bytes(v)}/s`));
}

function checkpointWords(run, c) {
	if (!c) return h("span", { class: "quiet" }, "none");
	const words = `${run.storage}:${c.name}`;
	return [h("a", { href: checkpointHref(words), "data-act": `newest-${words}` }, lastPart(c.name)), " · ",
		when(c.durable_at || c.modified_at)];
}

function retentionWords(run) {
	const r = retentionOf(store, run);
	if (!r) return h("span", { class: "quiet" }, "no policy: all stay");
	if (r.problem) return h("span", { class: "error" }, r.problem);
	if (r.remove.length === 0) return `nothing goes now (${r.policies.map((p) => p.name).join(", ")})`;
	return `${r.remove.length} ${r.remove.length === 1 ? "goes" : "go"}, ${bytes(r.bytes)} (${r.policies.map((p) => p.name).join(", ")})`;
}

function lostWords(v) {
	const since_ = v.newest?.durable_at || v.newest?.modified_at;
	if (!since_) return "everything";
	if (!v.active) return [h("b", {}, "nothing"), h("span", { class: "quiet" }, " – no trainer is here")];
	return [h("b", {}, since(since_)), " of work", v.steps > 0 ? `, ${v.steps} step${v.steps === 1 ? "" : "s"}` : ""];
}

function card(run) {
	const v = verdictOf(store, run), advice = run.more?.save_interval;
	const row = (label, ...value) => h("div", { class: "row" }, h("dt", {}, label), h("dd", {}, ...value));
	return h("article", { class: `card ${MARKS[v.state]}`, "data-run": `${run.storage}:${run.run}` },
		h("div", { class: "card-head" }, h("h4", {}, h("a", { href: runHref(run), "data-act": `run-${run.storage}:${run.run}` }, run.run === "-"
			? "(no run)" : run.run)),
			state(MARKS[v.state], WORDS[v.state])),
		h("p", { class: "small" }, `${run.storage} · ${run.checkpoints} checkpoint${run.checkpoints === 1 ? "" : "s"} · ${bytes(run.bytes)}`,
			run.holds ? ` · ${run.holds} held` : ""),
		h("p", { class: "card-words" }, v.words, v.failed ? [" ", jobLink(v.failed.id, "Why")] : null),
		h("dl", { class: "rows" },
			row("Newest durable", checkpointWords(run, v.newest)),
			row("Newest verified", checkpointWords(run, v.verified)),
			row("If it crashed now", lostWords(v)),
			row("Next retention", retentionWords(run)),
			v.usual && advice ? row("Saves", `every ${seconds(Math.round(v.usual) || v.usual)}`,
				advice?.async_s ? h("span", { class: "quiet" }, ` – every ${seconds(Math.round(advice.async_s))} would cost least`) : null) : null),
		trends(run));
}

const RANKED = ["bad", "late", "safe", "idle", "unknown"];

/** What is wrong comes first, then what trains; among these the newest. */
function inOrder() {
	return store.runs.map((run) => [RANKED.indexOf(verdictOf(store, run).state), run]).sort((a, b) => a[0] - b[0]).map(([, run]) => run);
}

/* ---- jobs ---- */

function jobItem(job) {
	const p = job.progress, live = !ENDED.has(job.state);
	const body = job.state === "failed" && job.error ? errorLine(job.error)
		: live && p?.bytes_total > 0 ? [bar(`Job ${job.id}`, p.bytes_done, p.bytes_total),
			h("div", { class: "small" }, `${job.stage} · `, numbers(p))]
			: live ? h("div", { class: "small" }, job.waits_for
				? `behind ${job.waits_for.kind} ${job.waits_for.target}${job.waits_for.ahead > 1 ? ` and ${job.waits_for.ahead - 1} more` : ""}`
				: job.stage || "waiting") : null;
	return h("li", {}, h("div", { class: "item-head" }, jobLink(job.id, [h("strong", {}, job.kind), " ",
		h("span", { class: "mono" }, what(job))]),
		h("span", { class: "small" }, when(job.finished_at || job.started_at || job.created_at))), body);
}

function group(title_, jobs, empty, filter, mark) {
	return h("section", { class: `panel ${jobs.length && mark ? mark : ""}`, "aria-label": title_ },
		h("h4", {}, title_, " ", jobs.length ? chip(String(jobs.length), jobs.length && mark === "edge-bad" ? "bad" : "idle") : null),
		jobs.length ? h("ul", { class: "items" }, jobs.slice(0, JOBS_SHOWN).map(jobItem)) : h("p", { class: "quiet" }, empty),
		jobs.length > JOBS_SHOWN ? h("p", { class: "small" }, h("a", { href: `#/jobs?state=${filter}` }, `all ${jobs.length}`)) : null);
}

function work() {
	const jobs = jobsInOrder(), running = jobs.filter((j) => !ENDED.has(j.state) && j.state !== "queued"),
		queued = jobs.filter((j) => j.state === "queued");
	return [group("Failed", failures(), "Nothing failed in the last day that was not made good.", "failed", "edge-bad"),
		group("Running", running, "Nothing runs.", "active"), group("Waiting", queued, "Nothing waits.", "queued")];
}

/* ---- space ---- */

function storageCard(s) {
	const f = forecast(store, s), used = s.total_bytes - s.free_bytes;
	const mark = s.state === "ok" ? f.hours < 6 ? "bad" : f.hours < 48 ? "warn" : "ok" : s.state === "unknown" ? "idle" : "bad";
	return h("article", { class: `card ${mark}`, "data-storage": s.name },
		h("div", { class: "card-head" }, h("h4", {}, h("a", { href: "#/storages", "data-act": `storage-${s.name}` }, s.name)), state(s.state)),
		s.total_bytes > 0 ? [meter(`Used space of ${s.name}`, used, s.total_bytes),
			h("p", { class: "small" }, `${bytes(s.free_bytes)} free of ${bytes(s.total_bytes)}`), h("p", { class: "forecast" }, forecastWords(f))]
				: null,
		s.trash?.checkpoints ? h("p", { class: "small" }, `${s.trash.checkpoints} in the trash, ${bytes(s.trash.bytes)}`) : null,
		s.tier ? h("p", { class: "small" }, `behind it ${s.tier.storage}: `,
			s.tier.waiting ? `${s.tier.waiting} wait, ${bytes(s.tier.bytes)}` : "all is copied") : null);
}

function memoryCard() {
	const shm = store.capabilities?.shm;
	if (!shm) return null;
	return h("article", { class: `card ${shm.used_bytes > 0.9 * shm.limit_bytes ? "warn" : "ok"}` },
		h("div", { class: "card-head" }, h("h4", {}, h("a", { href: "#/state-dicts", "data-act": "shm" }, "Shared memory")),
			state(shm.used_bytes > 0.9 * shm.limit_bytes ? "warn" : "ok", shm.used_bytes > 0.9 * shm.limit_bytes ? "nearly full" : "ok")),
		meter("Used shared memory", shm.used_bytes, shm.limit_bytes),
		h("p", { class: "small" }, `${bytes(shm.free_bytes)} free of ${bytes(shm.limit_bytes)}`),
		h("p", { class: "forecast" }, `${store.stateDicts.length} state dict${store.stateDicts.length === 1 ? "" : "s"}`,
			shm.orphaned_bytes ? `, ${bytes(shm.orphaned_bytes)} orphaned` : ""));
}

export function draw() {
	sync(parts.verdict, verdict());
	sync(parts.runs, store.runs.length ? inOrder().slice(0, RUNS_SHOWN).map(card)
		: h("p", { class: "quiet" }, "No run has saved yet. ", h("code", {}, "dcpd.save(state_dict, \"main:run1/step-100\")"),
			" makes the first one."));
	sync(parts.work, work());
	sync(parts.host, [...store.storages.map(storageCard), memoryCard()]);
}
