// runs.js: runs with their newest checkpoints, and policies with what they would remove.

import { all, get, page, post, runPath } from "../api/api.js";
import { bytes } from "../widgets/format.js";

const RUNS_MAX = 2000;
const RUNS_IN_FULL = 24;             // newest runs whose records are read too: what the overview shows
const CHECKPOINTS_OF_RUN = 60;
const RECORD_MS = 60000;             // a record is read anew after so long, though nothing was told of its run

const records = new Map();           // "STORAGE RUN" → {row, at, more}
let stale = 0;

/** Says that runs may have changed: the next list reads their records anew. */
export function runsChanged() {
	stale = Date.now();
}

/** The run's record, from memory while its row in the list is the same and no event came. */
async function recordOf(run) {
	const key = `${run.storage} ${run.run}`, row = JSON.stringify(run), known = records.get(key), now = Date.now();
	if (known && known.row === row && known.at > stale && now - known.at < RECORD_MS) return known.more;
	const more = await oneRun(run.storage, run.run).catch(() => null);
	records.set(key, { row, at: now, more });
	return more;
}

/** The runs of all storages, the newest first. A storage that does not answer shows in its own list. */
export async function listRuns() {
	const storages = await all("/v1/storages", "storages", 1000, 0);
	const lists = await Promise.all(storages.map((s) => (s.state === "ok" || s.state === "unknown" ? runsOf(s.name) : [])));
	const runs = lists.flat().sort((a, b) => (Date.parse(b.modified_at) || 0) - (Date.parse(a.modified_at) || 0));
	const found = await Promise.all(runs.slice(0, RUNS_IN_FULL).map(recordOf));
	found.forEach((more, i) => { runs[i].more = more; });
	return runs;
}

async function runsOf(storage) {
	const runs = [];
	let next = "";
	try {
		do {
			const part = await page(`/v1/runs`, "runs", 500, next, `storage=${encodeURIComponent(storage)}`);
			runs.push(...part.items);
			next = part.next;
		} while (next && runs.length < RUNS_MAX);
	} catch (error) {
		if (error.status === 404 || error.status === 504 || error.status === 503) return runs;
		throw error;
	}
	return runs;
}

export const oneRun = (storage, run, size = CHECKPOINTS_OF_RUN) => get(runPath(storage, run, `?page_size=${size}`));

/** Each policy with `preview`: what would go, and why the rest stays. */
export async function listPolicies() {
	const policies = (await get("/v1/policies")).policies || [];
	await Promise.all(policies.map(async (policy) => {
		try {
			policy.preview = await post(`/v1/policies/${encodeURIComponent(policy.name)}:preview`);
		} catch (error) {
			policy.problem = error.message;
		}
	}));
	return policies;
}

/** Does the policy's pattern take the run? `*` matches any run of characters. */
export function policyTakes(policy, storage, run) {
	if (policy.storage !== storage) return false;
	const words = policy.match.split("*").map((w) => w.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
	return new RegExp(`^${words.join(".*")}$`, "s").test(run);
}

export const runsOfPolicy = (runs, policy) => runs.filter((r) => policyTakes(policy, r.storage, r.run));

const GOES = { not_kept: "no rule keeps it", ttl: "older than it may be", bytes: "over the budget" };
const STAYS = { newest_durable: "the newest durable one", newest_verified: "the newest verified one", alias: "an alias leads to it",
	base_of_kept: "a delta needs it", in_use: "a job uses it", in_flight: "a job of the run still runs",
		unreadable: "it cannot be read",
	refused: "its removal failed", clock: "its time is in doubt", last: "among the newest", every_steps: "the one of its steps",
	every: "the one of its time", best: "among the best", ttl: "not that old yet", bytes: "within the budget",
		paused: "the policy is paused" };

/** Why a checkpoint goes, or stays, in words. */
export const reason = (why, goes) => (goes ? GOES : STAYS)[why] || why;

/** A policy in one sentence: "Keeps the newest 3 and the best by loss; the others go when they are older than 30d." */
export function ruleWords({ keep, verified_only: verified }) {
	const n = (count, words) => (count === 1 ? words : `${words} ${count}`);
	const stays = [keep.last && n(keep.last, "the newest"), keep.every_steps && `one each ${keep.every_steps} steps`, keep.every
		&& `one each ${keep.every}`,
		keep.best
			&& `${n(keep.best.count ?? 1, "the best")} by ${keep.best.mode === "max" ? "highest" : "lowest"} ${keep.best.metric}`].filter(Boolean);
	const ends = [keep.ttl && `when they are older than ${keep.ttl}`, keep.bytes !== undefined
		&& `while all take more than ${bytes(keep.bytes)}`].filter(Boolean);
	const list = stays.length > 1 ? `${stays.slice(0, -1).join(", ")} and ${stays.at(-1)}` : stays[0];
	const rest = `${list ? "the others go" : "All go"} ${ends.join(", and ") || "at once"}`;
	return `${list ? `Keeps ${list}${verified ? ", of verified ones" : ""}; ` : ""}${rest}.`;
}

/** What the policies do with a checkpoint: {goes: {policy, why}} or {stays: [why]} {unknown: problem}, or null without a policy for its
   run. */
export function fate(policies, storage, name) {
	for (const policy of policies) {
		if (policy.storage !== storage) continue;
		if (!policy.preview) {
			if (policyTakes(policy, storage, name.includes("/") ? name.slice(0, name.lastIndexOf("/"))
				: "-")) return { unknown: policy.problem };
			continue;
		}
		const goes = policy.preview.remove.find((x) => x.name === name);
		if (goes) return { goes };
		const stays = policy.preview.keep.find((x) => x.name === name);
		if (stays) return { stays: stays.why, policy: policy.name };
	}
	return null;
}
