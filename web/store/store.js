// store.js: what the page knows of the daemon, and how it is brought up to date.
//
// An event is a hint. When it carries the job, the job is taken from it; otherwise the thing it is about is fetched again, at
// most once at a time and not more often than every half second, however many events arrive. An answer that was asked for before
// a newer event came is asked for again, so that a job never steps back.

import { Problem, all, get, page } from "../api/api.js";
import { listPolicies, listRuns, runsChanged } from "./runs.js";

const JOB_PAGE = 200;
const JOBS_MAX = 20000;
const GAP_MS = 500;
const DETAILS_MAX = 50;
const DETAIL_RANKS_MAX = 1024;
const SAMPLES_MAX = 600;
const EVENTS_MAX = 200;

export const ENDED = new Set(["succeeded", "failed", "cancelled"]);

export const store = {
	jobs: new Map(),
	next: "",                    // page token of the jobs that are not loaded yet
	loading: false,
	plans: new Map(),            // job id → {state, plan}: asked for when a job is looked at
	checkpoints: [],
	stateDicts: [],
	deviceImages: [],
	storages: [],
	workers: [],
	warnings: [],                // what the daemon has to say of itself
	runs: [],                    // of the list, each with `more`: its record, for the newest ones
	policies: [],                // with `preview`
	capabilities: null,
	nodes: { nodes: [] },        // of the cluster; `problem`: why this daemon is not in it now
	doctor: null,
	samples: new Map(),          // job id → [{at, done, rate, ranks}]: progress, as it was told
	events: new Map(),           // job id → what happened to it while one looked
	failed: new Map(),           // list → why it could not be read
};

let changed = () => {};
let ended = () => {};
const seen = new Map();              // job id → count of events, to tell which answers are older
let order = null;

export function onChange(draw, announce) {
	changed = draw;
	ended = announce;
}

/** Newest first. Ids are ULIDs: they sort by time. */
export function jobsInOrder() {
	order = order || [...store.jobs.values()].sort((a, b) => (a.id < b.id ? 1 : a.id > b.id ? -1 : 0));
	return order;
}

export const jobById = (id) => store.jobs.get(id);

export function putJob(job) {
	if (!job || typeof job.id !== "string" || typeof job.state !== "string") return false;
	const before = store.jobs.get(job.id);
	store.jobs.set(job.id, job);
	order = null;
	if (ENDED.has(job.state) && before?.state !== job.state) {
		if (before) ended(job);
		runsChanged();
		["checkpoints", "stateDicts", "storages", "workers", "runs"].forEach(refresh);
	}
	changed();
	return true;
}

function touch(id) {
	seen.set(id, (seen.get(id) || 0) + 1);
}

const fetching = new Map();

/** Fetches one job. Calls while it is under way make one more fetch follow, not one each. */
export async function fetchJob(id) {
	if (fetching.has(id)) {
		fetching.set(id, true);
		return;
	}
	fetching.set(id, false);
	const mark = seen.get(id);
	try {
		const job = await get(`/v1/jobs/${encodeURIComponent(id)}`);
		if (seen.get(id) === mark || !store.jobs.has(id)) putJob(job);
		else fetching.set(id, true);     // older than what an event said meanwhile: ask again
	} catch (error) {
		if (error instanceof Problem && error.status === 404) {
			store.jobs.delete(id);
			order = null;
			changed();
		}
	}
	await new Promise((resolve) => setTimeout(resolve, GAP_MS));
	const again = fetching.get(id);
	fetching.delete(id);
	if (again) await fetchJob(id);
}

/** The first pages again, as many as were loaded before. Jobs that events changed meanwhile keep the event's word. */
export async function reloadJobs() {
	const want = Math.max(JOB_PAGE, store.jobs.size);
	const marks = new Map(seen);
	const fresh = new Map();
	let next = "";
	do {
		const part = await page("/v1/jobs", "jobs", JOB_PAGE, next);
		part.items.forEach((job) => fresh.set(job.id, job));
		next = part.next;
	} while (next && fresh.size < want);
	for (const [id, job] of store.jobs) if (seen.get(id) !== marks.get(id)) fresh.set(id, job);
	store.jobs = fresh;
	store.next = next;
	order = null;
	changed();
}

/** One more page of older jobs. */
export async function moreJobs() {
	if (store.loading || !store.next || store.jobs.size >= JOBS_MAX) return;
	store.loading = true;
	try {
		const part = await page("/v1/jobs", "jobs", 500, store.next);
		part.items.forEach((job) => { if (!store.jobs.has(job.id)) store.jobs.set(job.id, job); });
		store.next = part.next;
		order = null;
	} catch {
		store.next = "";
	} finally {
		store.loading = false;
		changed();
	}
}

/** A storage that does not answer must not hide the others: each is asked on its own. */
async function listCheckpoints() {
	const storages = await all("/v1/storages", "storages", 1000, 0);
	const lists = await Promise.all(storages.map(async (storage) => {
		const key = `checkpoints in ${storage.name}`;
		try {
			const items = await all(`/v1/checkpoints/${encodeURIComponent(storage.name)}`, "checkpoints", 20000);
			store.failed.delete(key);
			return items.map((c) => ({ storage: storage.name, ...c }));
		} catch (error) {
			store.failed.set(key, error.message);
			return store.checkpoints.filter((c) => c.storage === storage.name);
		}
	}));
	return lists.flat().sort((a, b) => Date.parse(b.modified_at) - Date.parse(a.modified_at) || (a.name < b.name ? -1 : 1));
}

/** The list has no slots; they are asked for one by one, where that is not too much. Publications come with their subscribers. */
async function listStateDicts() {
	const dicts = await all("/v1/state-dicts", "state_dicts", 5000);
	const published = dicts.some((d) => d.publish) ? (await get("/v1/publications").catch(() => null))?.publications || [] : [];
	return Promise.all(dicts.map(async (dict, i) => {
		const subscribers = dict.publish && published.find((p) => p.name === dict.name)?.subscribers;
		if (subscribers) dict = { ...dict, subscribers };
		if (dict.ranks || i >= DETAILS_MAX || dict.world_size > DETAIL_RANKS_MAX) return dict;
		return { ...dict, ...await get(`/v1/state-dicts/${encodeURIComponent(dict.name)}`).catch(() => null) };
	}));
}

const READ = {
	runs: listRuns,
	policies: listPolicies,
	capabilities: () => get("/v1/capabilities"),
	nodes: () => get("/v1/nodes"),
	doctor: () => get("/v1/doctor"),
	checkpoints: listCheckpoints,
	stateDicts: listStateDicts,
	deviceImages: () => all("/v1/device-images", "device_images", 5000, 0),
	storages: () => all("/v1/storages", "storages", 1000, 0),
	workers: () => all("/v1/workers", "workers", 5000, 0),
	warnings: async () => (await get("/readyz").catch(() => null))?.warnings || [],
};
const reading = new Map();
const LAZY = new Set(["checkpoints", "policies", "doctor", "deviceImages"]);   // read only while a view that shows them is open, or was
const wanted = new Set();

/** Names lists that the view on show needs beside those that are always kept. */
export function wants(lists) {
	for (const list of lists) {
		if (wanted.has(list)) continue;
		wanted.add(list);
		if (started) refresh(list);
	}
}

let started = false;

/** Reads one of the lists again, soon. */
export async function refresh(list) {
	if (LAZY.has(list) && !wanted.has(list)) return;
	if (reading.has(list)) {
		reading.set(list, true);
		return;
	}
	reading.set(list, false);
	try {
		store[list] = await READ[list]();
		store.failed.delete(list);
	} catch (error) {
		store.failed.set(list, error.message);
	}
	changed();
	await new Promise((resolve) => setTimeout(resolve, GAP_MS));
	const again = reading.get(list);
	reading.delete(list);
	if (again) await refresh(list);
}

export function refreshAll() {
	started = true;
	return Promise.all([reloadJobs(), ...Object.keys(READ).map(refresh)]);
}

export async function fetchPlan(job) {
	if (job.state === "queued") return; /* nothing to be asked yet */
	const known = store.plans.get(job.id);
	if (known && (known.plan || known.state === job.state)) return;
	store.plans.set(job.id, { state: job.state, plan: null });
	try {
		const plan = await get(`/v1/jobs/${encodeURIComponent(job.id)}/plan`);
		store.plans.set(job.id, { state: job.state, plan });
		changed();
	} catch {
		/* not planned yet, or gone: asked again when the state changes */
	}
}

/** Keeps what a job's view draws over time: progress as samples, the rest as lines. */
export function keep(id, event, data) {
	const at = Date.parse(data.at) || Date.now(), p = data.progress;
	if (p) {
		const list = store.samples.get(id) || [];
		if (list.length && at <= list.at(-1).at) return;
		list.push({ at, done: p.bytes_done || 0, rate: p.rate || 0 });
		if (list.length > SAMPLES_MAX) list.splice(0, list.length - SAMPLES_MAX);
		store.samples.set(id, list);
		return;
	}
	const list = store.events.get(id) || [];
	if (event.id && list.some((e) => e.id === event.id)) return;
	list.push({ id: event.id, at, type: event.type, data });
	if (list.length > EVENTS_MAX) list.shift();
	store.events.set(id, list);
}

/** Takes one event of the stream. Returns the parsed data, for notices. */
export function apply(event) {
	let data = null;
	try {
		data = JSON.parse(event.data);
	} catch {
		return null;
	}
	if (!data || typeof data !== "object") return null;
	const inner = data.data && typeof data.data === "object" ? data.data : data;
	if (event.type.startsWith("job.")) {
		const job = inner.job && typeof inner.job === "object" ? inner.job : inner;
		const id = typeof inner.job === "string" ? inner.job : job.id;
		if (typeof id !== "string") return inner;
		touch(id);
		keep(id, event, inner);
		if (event.type === "job.progress" && !job.kind && inner.progress && store.jobs.has(id)) {
			putJob({ ...store.jobs.get(id), ...(inner.stage && { stage: inner.stage }), progress: inner.progress });
		} else if (!(job.id === id && job.kind && putJob(job))) {
			fetchJob(id);
		}
	} else if (event.type.startsWith("checkpoint.")) {
		runsChanged();
		["checkpoints", "storages", "runs", "policies"].forEach(refresh);
	} else if (event.type.startsWith("worker.")) {
		refresh("workers");
		refresh("warnings");
	} else if (event.type.startsWith("storage.")) {
		refresh("storages");
	} else if (event.type.startsWith("state_dict.")) {
		refresh("stateDicts");
	} else if (event.type.startsWith("device_image.")) {
		refresh("deviceImages");
	} else {
		refreshAll().catch(() => {});
	}
	return inner;
}
