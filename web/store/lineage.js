// lineage.js: where a checkpoint comes from and what was made of it. The API looks for children in the checkpoint's own storage only; of
// those elsewhere the jobs know, and each of them knows its parents.

import { checkpointPath, get } from "../api/api.js";

const ELSEWHERE_MAX = 8;

const ask = (ref) => get(checkpointPath(ref, "/lineage")).catch(() => null);
const keyOf = (ref) => `${ref.storage}:${ref.name}`;

/** Lineage of a checkpoint with children in other storages; `from(job)`: does the job read what one looks at? */
export async function lineageOf(ref, jobs, from) {
	const elsewhere = new Map();
	for (const job of jobs) {
		const t = job.target;
		if (job.state !== "succeeded" || !t?.storage || !t.name || t.storage === ref.storage || !from(job)) continue;
		elsewhere.set(keyOf(t), { storage: t.storage, name: t.name });
		if (elsewhere.size === ELSEWHERE_MAX) break;
	}
	const [own, ...others] = await Promise.all([ask(ref), ...[...elsewhere.values()].map(ask)]);
	if (!own) return null;
	const nodes = new Map(own.nodes.map((n) => [keyOf(n), n])), edges = new Map(own.edges.map((e) => [`${e.parent} ${e.child}`, e]));
	for (const other of others) {
		for (const n of other?.nodes || []) if (!nodes.has(keyOf(n))) nodes.set(keyOf(n), n);
		for (const e of other?.edges || []) edges.set(`${e.parent} ${e.child}`, e);
	}
	return { ...own, nodes: [...nodes.values()], edges: [...edges.values()] };
}
