// health.js: is it safe? What the overview says first, worked out of what the store knows, without elements.

import { bytes, place, ref, seconds, what } from "../widgets/format.js";
import { policyTakes } from "./runs.js";
import { jobsInOrder } from "./store.js";

const LATE_FACTOR = 3;               // this many usual intervals without a checkpoint, and a run that trains is late
const LATE_MIN_S = 300;
const FAILED_HOURS = 24;
const FULL_SOON_H = 48;
const MEASURED_MIN_S = 3600;
const SHM_HIGH = 0.9;

const ageOf = (stamp) => (Date.now() - Date.parse(stamp)) / 1000;
const checkpointsOf = (run) => run.more?.checkpoints || [];
const timeOf = (c) => Date.parse(c.durable_at || c.modified_at);

/** Seconds between the run's last checkpoints: the median of up to ten pauses; null with fewer than two. */
export function usualInterval(run) {
	const times = checkpointsOf(run).slice(0, 11).map(timeOf).filter(Number.isFinite);
	const pauses = times.slice(1).map((t, i) => (times[i] - t) / 1000).filter((p) => p > 0).sort((a, b) => a - b);
	return pauses.length ? pauses[Math.floor(pauses.length / 2)] : null;
}

const runOf = (name) => (name.includes("/") ? name.slice(0, name.lastIndexOf("/")) : "-");

const saves = new WeakMap();         // the list of jobs → saves by run, so that each draw looks through all jobs once

function savesByRun() {
	const list = jobsInOrder();
	if (!saves.has(list)) {
		const found = new Map();
		for (const job of list) {
			const t = job.target;
			if (job.kind !== "save" || !job.finished_at || !t?.storage || !t.name) continue;
			const key = `${t.storage} ${runOf(t.name)}`;
			if (!found.has(key)) found.set(key, []);
			found.get(key).push(job);
		}
		for (const own of found.values()) own.reverse();
		saves.set(list, found);
	}
	return saves.get(list);
}

/** The run's saves that have ended, the oldest first. */
export const savesOf = (run) => savesByRun().get(`${run.storage} ${run.run}`) || [];

/** Does a trainer hold memory that the run is saved from? */
export function trains(store, run) {
	const last = savesOf(run).at(-1), name = last?.source?.state_dict;
	return Boolean(name && store.stateDicts.some((d) => d.name === name && !d.orphaned_at));
}

/**
 * {state: safe|late|bad|idle|unknown, words, newest, verified, lost}: `words` says why in one sentence; `newest` and `verified` are
 * checkpoints; `lost` is seconds and steps that a crash now would cost.
 */
export function verdictOf(store, run) {
	const more = run.more, list = checkpointsOf(run), newest = list[0] || null;
	const verified = list.find((c) => c.name === more?.aliases?.["latest-verified"])
		|| list.find((c) => c.verified?.state === "verified") || null;
	const last = savesOf(run).at(-1), failed = last?.state === "failed" ? last : null;
	const since = more?.lost_work?.since, lost = since ? ageOf(since) : null, usual = usualInterval(run);
	const base = { newest, verified, lost, steps: more?.lost_work?.steps ?? null, usual, failed, active: trains(store, run) };
	if (!more) return { ...base, state: "unknown", words: "Not looked at: open the run." };
	if (!newest) return { ...base, state: "bad", words: "There is no checkpoint." };
	if (newest.verified?.state === "damaged") {
		const good = list.find((c) => c.verified?.state !== "damaged");
		const other = good ? `; ${lastPart(good.name)} is the newest that is not` : "";
		return { ...base, state: "bad", words: `The newest checkpoint is damaged${other}.` };
	}
	if (failed) return { ...base, state: "bad",
		words: `The last save failed: ${failed.error?.title || failed.error?.code || "see the job"}.` };
	if (base.active && lost > Math.max(LATE_MIN_S, LATE_FACTOR * (usual ?? Infinity))) {
		return { ...base, state: "late",
			words: `It trains, and saves every ${seconds(Math.round(usual))} as a rule; the last is older.` };
	}
	const damaged = list.filter((c) => c.verified?.state === "damaged");
	if (damaged.length) return { ...base, state: "late",
		words: `The newest is whole; ${names(damaged)} ${damaged.length > 1 ? "are" : "is"} damaged.` };
	const proof = newest.verified?.state === "verified" ? "durable and verified" : verified ? "durable, an older one is verified"
		: "durable, none is verified";
	return { ...base, state: base.active ? "safe" : "idle", words: `The newest checkpoint is ${proof}.` };
}

export const lastPart = (name) => name.slice(name.lastIndexOf("/") + 1);
const names = (list) => list.slice(0, 2).map((c) => lastPart(c.name)).join(", ") + (list.length > 2 ? ` and ${list.length - 2} more`
	: "");

/** What the next look of retention removes of a run: {remove, bytes, policies}, or null without a policy. */
export function retentionOf(store, run) {
	const policies = store.policies.filter((p) => policyTakes(p, run.storage, run.run));
	if (policies.length === 0) return null;
	const goes = policies.flatMap((p) => p.preview?.remove || []).filter((x) => runOf(x.name) === run.run);
	return { policies, remove: goes, bytes: goes.reduce((sum, x) => sum + x.bytes, 0),
		problem: policies.map((p) => p.status?.problem || p.problem).find(Boolean) };
}

/**
 * When the storage is full, if its free space goes on to shrink as the daemon measured it, or, while it has looked for less than an hour,
 * if its runs go on to write as they did in the day behind: {per_hour, hours, measured_s}; hours Infinity: not at this pace. What retention
 * removed is only in what was measured, so that the other forecast is the early one.
 */
export function forecast(store, storage) {
	const g = storage.growth;
	if (g?.seconds >= MEASURED_MIN_S) {
		const per = (g.bytes / g.seconds) * 3600;
		return per > 0 ? { per_hour: per, hours: storage.free_bytes / per, measured_s: g.seconds } : { per_hour: 0, hours: Infinity,
			measured_s: g.seconds };
	}
	let sum = 0, first = Infinity;
	const begin = Date.now() - 24 * 3600e3;
	for (const run of store.runs) {
		if (run.storage !== storage.name) continue;
		for (const c of checkpointsOf(run)) {
			const t = timeOf(c);
			if (!(t >= begin)) continue;
			sum += Math.max(0, (c.bytes || 0) - (c.bytes_shared || 0));
			first = Math.min(first, t);
		}
	}
	if (!sum) return { per_hour: 0, hours: Infinity };
	const per = sum / (Math.max(600e3, Date.now() - first) / 3600e3);
	return { per_hour: per, hours: storage.free_bytes / per };
}

/** In words: "full in 3 d 4 h at 12 GiB an hour". */
export function forecastWords(f) {
	const over = f.measured_s ? ` (measured over ${seconds(f.measured_s)})` : "";
	if (!f.per_hour) return f.measured_s ? `free space does not shrink${over}` : "nothing was written in the last day";
	if (f.hours > 24 * 365) return `grows by ${bytes(f.per_hour)} an hour: room for over a year${over}`;
	return `full in ${seconds(f.hours * 3600)} at ${bytes(f.per_hour)} an hour${over}`;
}

/** Failed jobs of the last day that nothing later has made good: the same kind to the same target. */
export function failures() {
	const good = new Set(), list = [];
	for (const job of jobsInOrder()) {
		const key = `${job.kind} ${ref(job.target || job.source)}`;
		if (job.state === "succeeded") good.add(key);
		else if (job.state === "failed" && !good.has(key) && ageOf(job.finished_at
			|| job.created_at) < FAILED_HOURS * 3600) list.push(job);
	}
	return list;
}

/** Everything that wants a person: [{bad, words, detail, href}], the worst first. */
export function problemsOf(store) {
	const list = [];
	for (const run of store.runs) {
		const v = run.more && verdictOf(store, run);
		if (v && (v.state === "bad" || v.state === "late")) {
			list.push({ bad: v.state === "bad", words: `Run ${run.run}`, detail: v.words, href: runHref(run) });
		}
	}
	for (const job of failures().slice(0, 8)) {
		const e = job.error || {}, at = place(e);
		list.push({ bad: true, words: `${job.kind} ${what(job)} failed`,
			detail: `${e.title || e.code || "No reason is known"}${at ? ` (${at})` : ""}`,
			href: `#/jobs/${encodeURIComponent(job.id)}` });
	}
	for (const s of store.storages) {
		if (["stalled", "gone", "unavailable"].includes(s.state)) list.push({ bad: true, words: `Storage ${s.name}`,
			detail: `is ${s.state}`,
			href: "#/storages" });
		else if (s.total_bytes > 0 && s.free_bytes / s.total_bytes < 0.03) {
			list.push({ bad: true, words: `Storage ${s.name}`, detail: `has ${bytes(s.free_bytes)} left`, href: "#/storages" });
		} else {
			const f = forecast(store, s);
			if (f.hours < FULL_SOON_H) list.push({ bad: f.hours < 6, words: `Storage ${s.name}`, detail: forecastWords(f),
				href: "#/storages" });
		}
		if (s.tier?.state === "failing") list.push({ bad: true, words: `Tier of ${s.name}`, detail: s.tier.error?.detail
			|| "copies fail",
			href: "#/storages" });
	}
	const shm = store.capabilities?.shm;
	if (shm && shm.used_bytes > SHM_HIGH * shm.limit_bytes) {
		list.push({ bad: false, words: "Shared memory", detail: `is ${Math.round((100 * shm.used_bytes) / shm.limit_bytes)} % full`,
			href: "#/state-dicts" });
	}
	for (const p of store.policies) {
		if (p.status?.problem) list.push({ bad: false, words: `Policy ${p.name}`, detail: p.status.problem, href: "#/runs" });
	}
	for (const n of store.nodes.nodes) {
		if (n.state === "away") list.push({ bad: true, words: `Node ${n.name}`, detail: "is away: the cluster does not hear of it",
			href: "#/nodes" });
	}
	for (const w of store.warnings) list.push({ bad: false, words: "The daemon", detail: w, href: "#/doctor" });
	return list.sort((a, b) => Number(b.bad) - Number(a.bad));
}

export const runHref = (run) => `#/runs/${encodeURIComponent(run.storage)}/${encodeURIComponent(run.run)}`;
