// job.js: one job: why it failed, where its time goes, which rank it waits for, and what it did.

import { headers } from "../api/api.js";
import { Parser } from "../api/events.js";
import { $, fill, h, styled, sync, text, tip } from "../widgets/dom.js";
import { bytes, place, ref, seconds } from "../widgets/format.js";
import { bar, button, fact, numbers, refLink, state, when } from "../widgets/parts.js";
import { plot } from "../widgets/chart.js";
import { ENDED, fetchJob, fetchPlan, jobById, keep, store } from "../store/store.js";
import { action, setReport, summary, took } from "./job_actions.js";
import { back, rankList } from "./jobs.js";
import { damage, outcome, warnings } from "./outcome.js";

const RANKS_IN_VIEW = 512;
const TEXT_MAX = 200000;
const EVENTS_SHOWN = 60;

/* What to do about an error, by code: said below it, because who reads a failed job asks that next. */
const ADVICE = {
	digest_mismatch: "The file has changed since it was written. A verify lists every such place; a repair takes damaged bytes from a "
		+ "replica or from another checkpoint.",
	checkpoint_damaged: "Load an older checkpoint of the run, or repair this one: dcpctl repair takes damaged bytes from a replica or "
		+ "from another checkpoint.",
	storage_full: "Make room, or let retention do it: the run's view shows what a policy would remove. Then retry.",
	storage_stalled: "The storage did not answer in time. Jobs on other storages go on; retry when it answers again.",
	storage_io: "The storage reported an error: look at the host's kernel log for that device. Then retry.",
	worker_lost: "A worker process ended by itself; the daemon's log has its signal. A retry starts a new one.",
	checkpoint_exists: "Choose another name, or ask for overwrite.",
	missing_key: "The target has keys that the checkpoint lacks: load with strict false, or rename them.",
	size_mismatch: "The target's shapes are not the checkpoint's: compare both, or transform on the way.",
	not_sealed: "Not all ranks sealed the generation: the trainer stopped before its copy was whole.",
	coverage_hole: "The checkpoint does not have all of the tensor: it was not written by all of its ranks.",
};

let body = null;
let reading = null;

function errorPanel(error, bad, job) {
	const skip = new Set(["type", "title", "detail", "status", "instance", "damage"]);
	const first = ["code", "rank", "fqn", "file", "offset", "expected", "actual", "retryable"];
	const keys = [...first, ...Object.keys(error).filter((k) => !first.includes(k) && !skip.has(k))];
	const where = place(error);
	return h("div", { class: bad ? "panel bad" : "panel", id: "job-error" },
		h("h3", {}, error.title || "The job failed"),
		h("p", { class: "lead" }, error.detail || ""),
		bad && where ? h("p", {}, "Where: ", h("span", { class: "mono" }, where)) : null,
		bad && ADVICE[error.code] ? h("p", { class: "advice" }, ADVICE[error.code]) : null,
		h("dl", { class: "facts" }, keys.filter((k) => error[k] !== undefined && error[k] !== null).map((k) => {
			const value = typeof error[k] === "object" ? JSON.stringify(error[k]) : String(error[k]);
			return [h("dt", {}, k), h("dd", { class: "mono", "data-error": k }, value)];
		})),
		bad && job.spec ? [h("p", {}, "This does the same again:"), curl(job)] : null);
}

/** A line for a shell that repeats the job. The token stays out of it: the shell's variable has it. */
export function curlOf(job) {
	const quoted = JSON.stringify(job.spec).replaceAll("'", "'\\''");
	return `curl -sS -H "Authorization: Bearer $DCPD_TOKEN" -H 'Content-Type: application/json' -d '${quoted}' ${location.origin}/v1/jobs`;
}

const curl = (job) => h("div", { class: "copy" }, h("pre", { id: "job-curl", tabindex: "0",
	"aria-label": "Command that repeats the job" }, curlOf(job)),
	button("Copy", "copy-curl", () => navigator.clipboard?.writeText(curlOf(jobById(job.id) || job))
		.then(() => text($("announce"), "The command is in the clipboard"), () => {})));

const milestone = (job, name) => {
	const value = job.milestones?.[name];
	return typeof value === "string" ? when(value) : value;
};

/** What the job is about, with ways to the checkpoints and to the state dicts in shared memory. */
function whatLinked(job) {
	const spec = job.spec || job;
	const both = [ref(spec.source) ? spec.source : spec.a, ref(spec.target) ? spec.target : spec.b].filter(ref);
	return both.flatMap((r, i) => [i ? (spec.a ? " ↔ " : " → ") : null, refLink(r)]);
}

/** From which nodes the job has come: a node that is away loses its jobs to others. */
const takeovers = (job) => (job.taken_over?.length ? h("ul", { class: "plain", id: "job-taken-over" }, job.taken_over.map((t) =>
	h("li", {}, `from ${t.from} to ${t.to}, `, when(t.at), `: ${t.why}`))) : null);

function facts(job) {
	return fact([["Kind", job.kind], ["What", whatLinked(job)], ["State", state(job.state)], ["Stage", job.stage],
		["Waits for", job.waits_for ? `${job.waits_for.kind} ${job.waits_for.target}, ${job.waits_for.ahead} ahead` : null],
		["Created", when(job.created_at)], ["Started", job.started_at ? when(job.started_at) : null],
		["Finished", job.finished_at ? when(job.finished_at) : null], ["Took", took(job) >= 0 ? summary(job) : null], ["Attempt", job.attempt],
		["Node", job.node ? `${job.node}${job.node_away ? " (away)" : ""}` : null], ["Taken over", takeovers(job)],
		["Snapshotted", milestone(job, "snapshotted")], ["Durable", milestone(job, "durable")],
		["Replicated", job.milestones?.replicated ? milestone(job, "replicated") : null],
		["Neighbours", (job.replicas || []).map((r) => `${r.node}: ${r.why || r.state}`).join(", ")],
		["Chain", job.parent ? `${job.parent.chain}, step ${job.parent.step}` : null],
		["Labels", Object.entries(job.labels || {}).map(([k, v]) => `${k}=${v}`).join(", ")]]);
}

function object(title, id, value) {
	if (!value || typeof value !== "object" || Object.keys(value).length === 0) return null;
	let words = JSON.stringify(value, null, 2);
	if (words.length > TEXT_MAX) words = `${words.slice(0, TEXT_MAX)}\n… ${words.length - TEXT_MAX} characters more`;
	return h("details", { id, class: "panel" }, h("summary", {}, title), h("pre", { tabindex: "0", "aria-label": title }, words));
}

/* ---- where the time goes ---- */

/** [{stage, begin, end}] in ms; the last one goes on until now while the job lives. */
export function stagesOf(job) {
	const begin = Date.parse(job.created_at), end = job.finished_at ? Date.parse(job.finished_at) : Date.now();
	const list = (job.stages || []).map((s) => ({ stage: s.stage, begin: Date.parse(s.at) })).filter((s) => Number.isFinite(s.begin));
	if (list[0]?.begin > begin && list[0].stage !== "waiting") list.unshift({ stage: "waiting", begin });
	return list.map((s, i) => ({ ...s, end: Math.max(s.begin, list[i + 1]?.begin ?? end) }));
}

function gantt(job) {
	const list = stagesOf(job);
	if (list.length === 0) return null;
	const t0 = list[0].begin, span = Math.max(1, list.at(-1).end - t0);
	const longest = list.reduce((a, b) => (b.end - b.begin > a.end - a.begin ? b : a));
	return h("section", { class: "panel wide", id: "job-stages", "aria-label": "Stages" },
		h("h3", {}, "Stages", h("span", { class: "small" }, ` ${seconds(span / 1000)} in all; the longest is ${longest.stage}`)),
		h("ol", { class: "gantt" }, list.map((s, i) => {
			const part = (100 * (s.end - s.begin)) / span, words = `${s.stage}: ${seconds((s.end - s.begin) / 1000)}`;
			const lane = h("span", { class: "gantt-lane", "aria-hidden": "true" },
				styled(h("span", { class: `gantt-bar s${i % 6}${s === longest ? " longest" : ""}` }),
					{ "margin-left": `${((100 * (s.begin - t0)) / span).toFixed(2)}%`,
					width: `${Math.max(0.4, part).toFixed(2)}%` }));
			return tip(h("li", {}, h("span", { class: "gantt-name" }, s.stage), lane,
				h("span", { class: "gantt-time" }, seconds((s.end - s.begin) / 1000))),
				() => [words, `${part.toFixed(1)} % of the job`, `from ${new Date(s.begin).toISOString()}`]);
		})));
}

function rate(job) {
	const list = store.samples.get(job.id) || [];
	const points = list.filter((p) => p.rate > 0).map((p) => ({ x: p.at, y: p.rate,
		words: [`${bytes(p.rate)}/s`, `${bytes(p.done)} done`] }));
	if (points.length < 2) return null;
	const t0 = list[0].at;
	return h("section", { class: "panel", id: "job-rate", "aria-label": "Rate" }, h("h3", {}, "Rate"),
		plot(points, { label: "Bytes a second over time", y: (v) => `${bytes(v)}/s`, x: (v) => seconds((v - t0) / 1000), binary: true }));
}

/** The rank that the others wait for: the least of its share is done. */
export function slowest(job) {
	const ranks = (job.progress?.ranks || []).filter((r) => r.bytes_total > 0);
	if (ranks.length < 2) return null;
	const share = (r) => r.bytes_done / r.bytes_total;
	const last = ranks.reduce((a, b) => (share(b) < share(a) ? b : a));
	if (ranks.every((r) => share(r) === share(last)) && share(last) < 1) return null;
	if (share(last) < 1) return { rank: last.rank,
		words: `rank ${last.rank} is the slowest: ${Math.floor(100 * share(last))} % of ${bytes(last.bytes_total)}` };
	const most = ranks.reduce((a, b) => (b.bytes_total > a.bytes_total ? b : a)),
		mean = ranks.reduce((sum, r) => sum + r.bytes_total, 0) / ranks.length;
	const times = (most.bytes_total / mean).toFixed(2);
	return { rank: most.rank, words: `rank ${most.rank} had the most: ${bytes(most.bytes_total)}, ${times} × the mean` };
}

function progress(job) {
	const p = job.progress;
	if (!p || !(p.bytes_total > 0)) return null;
	const slow = slowest(job), list = rankList(job, RANKS_IN_VIEW);
	if (slow) list?.querySelector(`[data-rank="${slow.rank}"]`)?.classList.add("slowest");
	return h("section", { class: "panel", id: "job-progress", "aria-label": "Progress" },
		h("h3", {}, ENDED.has(job.state) ? "Ranks" : "Progress"),
		ENDED.has(job.state) ? null : [bar(`Job ${job.id}`, p.bytes_done, p.bytes_total), h("p", { class: "small" }, numbers(p))],
		slow ? h("p", { class: "small" }, slow.words) : null, list);
}

function events(job) {
	const list = (store.events.get(job.id) || []).slice(-EVENTS_SHOWN);
	if (list.length === 0) return null;
	const t0 = Date.parse(job.created_at) || list[0].at;
	const words = (e) => [e.data.state, e.data.stage, e.data.error?.code, e.data.what].filter(Boolean).join(" · ");
	return h("details", { class: "panel", id: "job-events", open: "" }, h("summary", {}, "Events"),
		h("ol", { class: "log" }, list.map((e) => h("li", {}, h("span", { class: "log-time" }, `+${seconds(Math.max(0, (e.at - t0) / 1000))}`),
			h("span", { class: "mono" }, e.type), " ", words(e)))));
}

export function draw(route) {
	const id = route.id, job = jobById(id);
	text($("h-job"), `Job ${id}`);
	if (!job) {
		sync(body, h("p", {}, "The daemon knows no job of this id."));
		return;
	}
	fetchPlan(job);
	sync(body, [
		job.error ? errorPanel(job.error, job.state !== "cancelled", job) : null,
		h("div", { class: "panel", id: "job-facts" }, facts(job), h("div", { class: "pager" }, action(job) || h("span", { class: "small" },
			job.state === "committing" ? "Committing: it can no longer be cancelled." : ""))),
		damage(job.error),
		warnings(job),
		outcome(job),
		progress(job),
		gantt(job),
		rate(job),
		events(job),
		object("Result", "job-result", job.result),
		object("Plan", "job-plan", store.plans.get(id)?.plan),
		object("Request", "job-request", job.spec),
		job.spec && !job.error ? h("details", { class: "panel" }, h("summary", {}, "Do it again"), curl(job)) : null,
	]);
}

/** Reads what happened before this page looked: the job's own stream tells it from the begin, and ends with the job. */
async function readPast(id) {
	reading?.abort();
	const mine = reading = new AbortController();
	try {
		const response = await fetch(`/v1/jobs/${encodeURIComponent(id)}/events`, { headers: headers({ Accept: "text/event-stream" }),
			cache: "no-store", signal: mine.signal });
		if (!response.ok) return;
		const parser = new Parser((event) => {
			try {
				keep(id, event, JSON.parse(event.data));
			} catch {
				/* not an object: the next one may be */
			}
			redraw();
		}, () => {});
		const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
		for (;;) {
			const { done, value } = await reader.read();
			if (done) return;
			parser.push(value);
		}
	} catch {
		/* the connection is gone, or the view: what is known is shown */
	}
}

let redraw = () => {};
export const title = (route) => `Job ${route.id}`;

export function mount(root, route, page) {
	redraw = page.draw;
	setReport(page.note);
	body = h("div", { id: "job-body" });
	fill(root, [h("p", { class: "crumbs" }, h("a", { id: "all-jobs", href: back() }, "All jobs")),
		h("h2", { id: "h-job", tabindex: "-1" }, `Job ${route.id}`), body]);
	fetchJob(route.id);
	readPast(route.id);
}

export function leave() {
	reading?.abort();
	reading = null;
}
