// outcome.js: what came of a job, as tables: differences, tensors that moved, damage, warnings.

import { h } from "../widgets/dom.js";
import { bytes, number, shape } from "../widgets/format.js";
import { verdict } from "./job_actions.js";

const DIFFERENCES_SHOWN = 100;
const FALLBACKS_SHOWN = 20;
const DAMAGE_SHOWN = 100;

export function differences(result) {
	const list = result.differences || [];
	if (list.length === 0) return null;
	const words = (v) => (v === undefined || v === null ? "–" : typeof v === "object" ? JSON.stringify(v) : String(v));
	const heads = ["Path", "What", "A", "B"];
	const sides = (d) => (d.elements > 0 && d.a === null && d.b === null
		? [`${number(d.count)} of ${number(d.elements)} elements differ`, `by ${number(d.max_abs)} at most`] : [d.a, d.b]);
	const cell = (v, i) => h("td", { class: "mono", role: "cell", "data-label": heads[i + 1] }, words(v));
	return h("table", { id: "job-differences", role: "table" },
		h("caption", {}, list.length > DIFFERENCES_SHOWN ? `The first ${DIFFERENCES_SHOWN} differences` : "Differences"),
		h("thead", { role: "rowgroup" }, h("tr", { role: "row" },
			heads.map((word) => h("th", { scope: "col", role: "columnheader" }, word)))),
		h("tbody", { role: "rowgroup" }, list.slice(0, DIFFERENCES_SHOWN).map((d) => h("tr", { role: "row" },
			h("th", { scope: "row", role: "rowheader", class: "mono" }, d.path || "–"), [d.what, ...sides(d)].map(cell)))));
}

/** Counts of a diff that are not 0: "3 changed, 1 added". */
export const changes = (counts) => Object.entries(counts || {}).filter(([, n]) => n > 0).map(([word, n]) => `${n} ${word}`).join(", ");

/** The tensors of a diff that moved most. */
export function movers(result) {
	const list = result.movers || [];
	if (list.length === 0) return null;
	const columns = [["Moved most", "path"], ["Dtype", "dtype"], ["Shape", "shape"], ["Relative L2", "rel_l2"], ["Cosine", "cosine"],
		["Max abs", "max_abs"], ["Elements changed", "count"], ["Of", "elements"], ["Bits changed", "bits_changed"]];
	const cell = (m) => ([word, key]) => h("td", { class: "mono nowrap", role: "cell", "data-label": word },
		key === "shape" ? shape(m.shape) : number(m[key]));
	return h("div", { class: "scroll", role: "region", "aria-label": "Tensors that moved most", tabindex: "0" },
		h("table", { id: "job-movers", role: "table" },
			h("thead", { role: "rowgroup" }, h("tr", { role: "row" },
				columns.map(([word]) => h("th", { scope: "col", role: "columnheader" }, word)))),
			h("tbody", { role: "rowgroup" }, list.slice(0, DIFFERENCES_SHOWN).map((m) => h("tr", { role: "row" },
				h("th", { scope: "row", role: "rowheader", class: "mono" }, m.path || "–"), columns.slice(1).map(cell(m)))))));
}

/** "98.2 % (1.1 GiB; 1.0 GiB known by digest)" */
export function unchanged(u) {
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
export function outcome(job) {
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

/** All that a verify found damaged, the first of it. */
export function damage(error) {
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
export function warnings(job) {
	const list = job.result?.warnings || [];
	return list.length ? h("div", { class: "notice", id: "job-warnings" },
		h("div", {}, list.map((w) => h("div", {}, w.detail || w.code)))) : null;
}
