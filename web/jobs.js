// jobs.js: the list of jobs and the view of one job, with what can be done to it.

import { post } from "./api.js";
import { $, address, confirm, h, pager, remember, rows, sync, text } from "./dom.js";
import { ago, bytes, number, percent, place, ref, seconds, shape, what } from "./format.js";
import { ENDED, fetchJob, fetchPlan, jobById, jobsInOrder, moreJobs, putJob, store } from "./store.js";

const PAGE = 50;
const RANKS_IN_LIST = 8;
const RANKS_IN_VIEW = 512;
const TEXT_MAX = 200000;
const DIFFERENCES_SHOWN = 100;
const FALLBACKS_SHOWN = 20;
const DAMAGE_SHOWN = 100;

const view = { page: 0, text: "", state: "" };

export const when = (stamp) => (stamp ? h("time", { datetime: stamp, title: stamp, "data-ago": true }, ago(stamp)) : "–");
export const state = (word) => h("span", { class: "state", "data-state": word }, word);

function haystack(job) {
	const error = job.error || {};
	return [job.id, job.kind, what(job), ...Object.entries(job.labels || {}).flat(), error.code, error.fqn, error.file, error.detail]
		.filter(Boolean).join("\n").toLowerCase();
}

function matches(job) {
	if (view.state === "active" ? ENDED.has(job.state) : view.state && job.state !== view.state) return false;
	return !view.text || haystack(job).includes(view.text);
}

function bar(label, done, total) {
	const value = percent(done, total);
	return h("progress", { "aria-label": label, max: 100, value: value === null ? null : value.toFixed(1) }, "");
}

function rankList(job, most) {
	const ranks = job.progress?.ranks || [];
	if (ranks.length === 0) return null;
	const rest = ranks.length - most;
	return h("ul", { class: "ranks", "aria-label": "Progress per rank" },
		ranks.slice(0, most).map((r) => h("li", { "data-rank": r.rank },
			`rank ${r.rank}`, bar(`Rank ${r.rank}`, r.bytes_done, r.bytes_total),
			`${Math.floor(percent(r.bytes_done, r.bytes_total) ?? 0)} %`)),
		rest > 0 ? h("li", {}, `and ${rest} more`) : null);
}

function numbers(progress) {
	const parts = [`${bytes(progress.bytes_done)} of ${bytes(progress.bytes_total)}`];
	if (progress.rate > 0) parts.push(`${bytes(progress.rate)}/s`);
	if (progress.eta_s > 0) parts.push(`${seconds(Math.ceil(progress.eta_s))} left`);
	return parts.join(" · ");
}

function progressCell(job) {
	const p = job.progress;
	if (job.state === "failed" && job.error) {
		const where = place(job.error);
		return [h("div", { class: "error" },
			h("strong", {}, job.error.code || "error"), ` ${job.error.detail || job.error.title || ""}`),
			where ? h("div", { class: "error mono" }, where) : null];
	}
	if (ENDED.has(job.state)) return h("span", { class: "small" }, summary(job));
	if (!p || !(p.bytes_total > 0)) return h("span", { class: "small" }, job.stage || "waiting");
	return [bar(`Job ${job.id}`, p.bytes_done, p.bytes_total),
		h("div", { class: "small" }, job.stage ? `${job.stage} · ` : "", numbers(p)), rankList(job, RANKS_IN_LIST)];
}

function took(job) {
	return (Date.parse(job.finished_at) - Date.parse(job.started_at)) / 1000;
}

/** In words: do the two sides of a diff or a compare agree? */
function verdict(result) {
	if (result.equal) return "equal";
	const n = result.difference_count ?? (result.differences || []).length;
	return `${n} difference${n === 1 ? "" : "s"}`;
}

function summary(job) {
	const s = took(job), n = job.progress?.bytes_done;
	const parts = typeof job.result?.equal === "boolean" ? [verdict(job.result)] : [];
	if (n > 0) parts.push(bytes(n));
	if (s >= 0) parts.push(seconds(s));
	if (n > 0 && s > 0.001) parts.push(`${bytes(n / s)}/s`);
	return parts.join(" · ") || "–";
}

/** Cancel for what is under way, retry for what may go better another time. While committing there is no way back: no button. */
function action(job) {
	if (!ENDED.has(job.state) && job.state !== "committing") {
		return h("button", { type: "button", "data-act": `cancel-${job.id}`, click: () => cancel(job.id),
			"aria-label": `Cancel job ${job.id}` }, "Cancel");
	}
	if (job.state === "cancelled" || (job.state === "failed" && job.error?.retryable !== false)) {
		return h("button", { type: "button", "data-act": `retry-${job.id}`, click: () => retry(job.id),
			"aria-label": `Retry job ${job.id}` }, "Retry");
	}
	return null;
}

async function cancel(id) {
	const job = jobById(id);
	const words = `${job?.kind || "job"} ${what(job || {})}. What it has written so far is removed; `
		+ "what was there before stays as it is.";
	if (!(await confirm(`Cancel job ${id}?`, words, "Yes, cancel it"))) return;
	await act(id, "cancel");
}

async function retry(id) {
	const job = jobById(id);
	if (!(await confirm(`Run job ${id} again?`, `${job?.kind || "job"} ${what(job || {})}`, "Yes, retry"))) return;
	const answer = await act(id, "retry");
	if (answer && answer.id && answer.id !== id) location.hash = `#/jobs/${encodeURIComponent(answer.id)}`;
}

let report = () => {};

async function act(id, verb) {
	try {
		const answer = await post(`/v1/jobs/${encodeURIComponent(id)}:${verb}`);
		if (!putJob(answer)) fetchJob(id);
		return answer;
	} catch (error) {
		report(`Could not ${verb} job ${id}: ${error.message}`);
		fetchJob(id);
		return null;
	}
}

const jobLink = (id) => h("a", { class: "mono", href: `#/jobs/${encodeURIComponent(id)}`, "data-act": `open-${id}` }, id);

export function drawJobs() {
	const found = view.text || view.state ? jobsInOrder().filter(matches) : jobsInOrder();
	const filtered = Boolean(view.text || view.state);
	const last = Math.max(0, Math.ceil(found.length / PAGE) - 1);
	if (store.next && (filtered || view.page >= last)) moreJobs();
	if (store.jobs.size && !store.next) view.page = Math.min(view.page, last);
	const shown = found.slice(view.page * PAGE, (view.page + 1) * PAGE);
	const empty = store.loading || store.next ? "Looking …" : filtered ? "No job matches." : "No jobs yet.";
	rows($("jobs").tBodies[0], shown, (job) => job.id, (job) => [
		h("th", { scope: "row" }, jobLink(job.id)),
		h("td", { class: "name" }, h("strong", {}, job.kind), " ", h("span", { class: "mono" }, what(job))),
		h("td", {}, state(job.state)),
		h("td", { class: "name" }, progressCell(job)),
		h("td", {}, when(job.created_at)),
		h("td", {}, action(job)),
	], empty);
	pager($("jobs-pager"), { page: view.page, size: PAGE, total: found.length, more: Boolean(store.next), word: "jobs",
		go: (page) => {
			view.page = page;
			remember("jobs", filter());
			drawJobs();
		} });
}

const filter = () => ({ text: $("jobs-text").value.trim(), state: view.state, page: view.page ? String(view.page + 1) : "" });

function take() {
	view.text = $("jobs-text").value.trim().toLowerCase();
	view.state = $("jobs-state").value;
}

/** Filters the list as the address says. */
export function filterJobs(query) {
	$("jobs-text").value = query.get("text") || "";
	$("jobs-state").value = query.get("state") || "";
	if ($("jobs-state").selectedIndex < 0) $("jobs-state").value = "";
	take();
	view.page = Math.max(0, (Number.parseInt(query.get("page"), 10) || 1) - 1);
}

function errorPanel(error, bad) {
	const skip = new Set(["type", "title", "detail", "status", "instance", "damage"]);
	const first = ["code", "rank", "fqn", "file", "offset", "expected", "actual", "retryable"];
	const keys = [...first, ...Object.keys(error).filter((k) => !first.includes(k) && !skip.has(k))];
	return h("div", { class: bad ? "panel bad" : "panel", id: "job-error" },
		h("h3", {}, error.title || "The job failed"),
		h("p", {}, error.detail || ""),
		h("dl", { class: "facts" }, keys.filter((k) => error[k] !== undefined && error[k] !== null).map((k) => {
			const value = typeof error[k] === "object" ? JSON.stringify(error[k]) : String(error[k]);
			return [h("dt", {}, k), h("dd", { class: "mono", "data-error": k }, value)];
		})));
}

const milestone = (job, name) => {
	const value = job.milestones?.[name];
	return typeof value === "string" ? when(value) : value;
};

/** The same words as `what`, with a way to the state dicts in shared memory. */
function whatLinked(job) {
	const spec = job.spec || job;
	const both = [ref(spec.source) || ref(spec.a), ref(spec.target) || ref(spec.b)].filter(Boolean);
	return both.flatMap((words, i) => [i ? (spec.a ? " ↔ " : " → ") : null, words.startsWith("shm:")
		? h("a", { class: "mono", href: "#/state-dicts", "data-act": `shm-${i}` }, words) : h("span", { class: "mono" }, words)]);
}

function differences(result) {
	const list = result.differences || [];
	if (list.length === 0) return null;
	const words = (v) => (v === undefined || v === null ? "–" : typeof v === "object" ? JSON.stringify(v) : String(v));
	const heads = ["Path", "What", "A", "B"];
	const cell = (v, i) => h("td", { class: "mono", role: "cell", "data-label": heads[i + 1] }, words(v));
	return h("table", { id: "job-differences", role: "table" },
		h("caption", {}, list.length > DIFFERENCES_SHOWN ? `The first ${DIFFERENCES_SHOWN} differences` : "Differences"),
		h("thead", { role: "rowgroup" }, h("tr", { role: "row" },
			heads.map((word) => h("th", { scope: "col", role: "columnheader" }, word)))),
		h("tbody", { role: "rowgroup" }, list.slice(0, DIFFERENCES_SHOWN).map((d) => h("tr", { role: "row" },
			h("th", { scope: "row", role: "rowheader", class: "mono" }, d.path || "–"), [d.what, d.a, d.b].map(cell)))));
}

/** Counts of a diff that are not 0: "3 changed, 1 added". */
const changes = (counts) => Object.entries(counts || {}).filter(([, n]) => n > 0).map(([word, n]) => `${n} ${word}`).join(", ");

/** The tensors of a diff that moved most. */
function movers(result) {
	const list = result.movers || [];
	if (list.length === 0) return null;
	const columns = [["Moved most", "path"], ["Dtype", "dtype"], ["Shape", "shape"], ["Relative L2", "rel_l2"], ["Cosine", "cosine"],
		["Max abs", "max_abs"], ["Elements changed", "count"], ["Of", "elements"], ["Bits changed", "bits_changed"]];
	const cell = (m) => ([word, key]) => h("td", { class: "mono", role: "cell", "data-label": word },
		key === "shape" ? shape(m.shape) : number(m[key]));
	return h("div", { class: "scroll", role: "region", "aria-label": "Tensors that moved most", tabindex: "0" },
		h("table", { id: "job-movers", role: "table" },
			h("thead", { role: "rowgroup" }, h("tr", { role: "row" },
				columns.map(([word]) => h("th", { scope: "col", role: "columnheader" }, word)))),
			h("tbody", { role: "rowgroup" }, list.slice(0, DIFFERENCES_SHOWN).map((m) => h("tr", { role: "row" },
				h("th", { scope: "row", role: "rowheader", class: "mono" }, m.path || "–"), columns.slice(1).map(cell(m)))))));
}

/** "98.2 % (1.1 GiB; 1.0 GiB known by digest)" */
function unchanged(u) {
	const parts = `${bytes(u.by_digest?.bytes)} by digest, ${bytes(u.by_reading?.bytes)} by reading`;
	return `${number(100 * (u.share ?? 0))} % (${bytes(u.bytes)}; ${parts})`;
}

/** "model.b past model.* to Shard(0), and 2 more" */
function fellBack(r) {
	const shown = r.fell_back.slice(0, FALLBACKS_SHOWN).map((f) => `${f.fqn} past ${f.rule} to ${f.took ?? "the default"}`);
	const rest = (r.fell_back_count ?? r.fell_back.length) - shown.length;
	return [shown.map((words) => h("div", { class: "mono" }, words)), rest > 0 ? h("div", {}, `and ${rest} more`) : null];
}

/** What came of a comparison, or of an operation on state dicts; the whole result stands below as it is. */
function outcome(job) {
	const r = job.result;
	if (job.state !== "succeeded" || !r) return null;
	const list = [];
	if (typeof r.equal === "boolean") list.push(["Verdict", verdict(r)]);
	if (r.totals) list.push(["Tensors", changes(r.totals.tensors) || "none"], ["Values", changes(r.totals.values) || "none"]);
	if (r.unchanged) list.push(["Unchanged", unchanged(r.unchanged)]);
	if (Number.isInteger(r.moved_bytes)) {
		list.push(["Generation", r.generation], ["Back end", r.backend], ["Tensors", r.tensors],
			["Moved between ranks", `${bytes(r.moved_bytes)} of ${bytes(r.needed_bytes ?? r.moved_bytes)} needed`],
			...["cast", "resized", "missing", "dropped"].filter((k) => r[k]?.length).map((k) => [k, `${r[k].length}`]));
	}
	if (r.unmatched_rules?.length) list.push(["Rules that took no tensor", r.unmatched_rules.join(", ")]);
	if (r.fell_back?.length) list.push(["Lack the dim of a rule", fellBack(r)]);
	if (list.length === 0) return null;
	return h("section", { class: "panel", id: "job-outcome", "aria-label": "Outcome" },
		h("dl", { class: "facts" }, list.filter(([, v]) => v !== undefined).map(([k, v]) => [h("dt", {}, k), h("dd", {}, v)])),
		movers(r), differences(r));
}

function facts(job) {
	const list = [["Kind", job.kind], ["What", whatLinked(job)], ["State", state(job.state)], ["Stage", job.stage],
		["Created", when(job.created_at)], ["Started", when(job.started_at)], ["Finished", when(job.finished_at)],
		["Took", took(job) >= 0 ? summary(job) : null], ["Attempt", job.attempt],
		["Snapshotted", milestone(job, "snapshotted")], ["Durable", milestone(job, "durable")],
		["Labels", Object.entries(job.labels || {}).map(([k, v]) => `${k}=${v}`).join(", ")]];
	return h("dl", { class: "facts" }, list.filter(([, v]) => v !== undefined && v !== null && v !== "" && v !== "–" && v !== false)
		.map(([k, v]) => [h("dt", {}, k), h("dd", {}, v === true ? "yes" : v)]));
}

function object(title, id, value) {
	if (!value || typeof value !== "object" || Object.keys(value).length === 0) return null;
	let words = JSON.stringify(value, null, 2);
	if (words.length > TEXT_MAX) words = `${words.slice(0, TEXT_MAX)}\n… ${words.length - TEXT_MAX} characters more`;
	return h("section", { id, "aria-label": title }, h("h3", {}, title), h("pre", { tabindex: "0", "aria-label": title }, words));
}

/** All that a verify found damaged, the first of it. */
function damage(error) {
	const list = error?.damage || [];
	if (list.length === 0) return null;
	const all = error.damage_count ?? list.length, shown = list.slice(0, DAMAGE_SHOWN);
	const heads = ["File", "Rank", "Tensor", "Offset", "Bytes", "What"];
	const cell = (v, i) => h("td", { class: "mono", role: "cell", "data-label": heads[i + 1] }, v ?? "–");
	return h("section", { class: "panel", id: "job-damage", "aria-label": "Damage" },
		h("h3", {}, all > shown.length ? `Damage: the first ${shown.length} of ${all} places` : "Damage"),
		h("div", { class: "scroll", role: "region", "aria-label": "Damaged places", tabindex: "0" }, h("table", { role: "table" },
			h("thead", { role: "rowgroup" }, h("tr", { role: "row" },
				heads.map((word) => h("th", { scope: "col", role: "columnheader" }, word)))),
			h("tbody", { role: "rowgroup" }, shown.map((x) => h("tr", { role: "row" },
				h("th", { scope: "row", role: "rowheader", class: "mono" }, x.file || "–"),
				[x.rank, x.fqn, x.offset, x.bytes, x.part || x.code].map(cell)))))));
}

/** What a job has to say although it succeeded. */
function warnings(job) {
	const list = job.result?.warnings || [];
	return list.length ? h("div", { class: "notice", id: "job-warnings" },
		h("div", {}, list.map((w) => h("div", {}, w.detail || w.code)))) : null;
}

export function drawJob(id) {
	text($("h-job"), `Job ${id}`);
	$("all-jobs").href = address("jobs", filter());
	const job = jobById(id);
	if (!job) {
		sync($("job-body"), h("p", {}, "The daemon knows no job of this id."));
		return;
	}
	fetchPlan(job);
	const p = job.progress;
	sync($("job-body"), [
		h("div", { class: "panel" }, facts(job), h("div", { class: "pager" }, action(job) || h("span", { class: "small" },
			job.state === "committing" ? "Committing: it can no longer be cancelled." : ""))),
		job.error ? errorPanel(job.error, job.state !== "cancelled") : null,
		damage(job.error),
		warnings(job),
		outcome(job),
		p && p.bytes_total > 0 && job.state !== "succeeded" ? h("section", { class: "panel", "aria-label": "Progress" },
			h("h3", {}, "Progress"), bar(`Job ${id}`, p.bytes_done, p.bytes_total), h("p", { class: "small" }, numbers(p)),
			rankList(job, RANKS_IN_VIEW)) : null,
		object("Result", "job-result", job.result),
		object("Plan", "job-plan", store.plans.get(id)?.plan),
		object("Request", "job-request", job.spec),
	]);
}

export function initJobs(onError, draw) {
	report = onError;
	const update = () => {
		take();
		view.page = 0;
		remember("jobs", filter());
		draw();
	};
	const form = $("jobs-text").form;
	form.addEventListener("submit", (event) => event.preventDefault());
	form.addEventListener("reset", () => setTimeout(update));
	$("jobs-text").addEventListener("input", update);
	$("jobs-state").addEventListener("change", update);
}
