// compare.js: two checkpoints side by side: what came, went, was reshaped or changed, how much is the same, and what moved most.

import { post } from "../api/api.js";
import { $, fill, h, sync } from "../widgets/dom.js";
import { bytes, number, percent, ref as refWords } from "../widgets/format.js";
import { bar, field, jobLink, panel, stat } from "../widgets/parts.js";
import { shares } from "../widgets/chart.js";
import { ENDED, jobsInOrder, putJob, store } from "../store/store.js";
import { differences, movers } from "./outcome.js";

export const needs = ["checkpoints"];
let at = { a: "", b: "", job: "", problem: "" };
let redraw = () => {};

const refOf = (words) => {
	const i = words.indexOf(":");
	return i > 0 ? { storage: words.slice(0, i), name: words.slice(i + 1) } : null;
};

/** The newest diff of the two that this daemon knows, running or done. */
function known() {
	if (at.job) return store.jobs.get(at.job);
	return jobsInOrder().find((j) => j.kind === "diff" && refWords(j.a) === at.a && refWords(j.b) === at.b && j.state !== "failed"
		&& j.state !== "cancelled");
}

async function compare() {
	const a = refOf(at.a), b = refOf(at.b);
	at.problem = "";
	if (!a || !b) at.problem = "Name two checkpoints, each as STORAGE:NAME.";
	else {
		try {
			const job = await post("/v1/jobs", { kind: "diff", a, b, top: 50 });
			at.job = job.id;
			putJob(job);
		} catch (error) {
			at.problem = error.message;
		}
	}
	redraw();
}

const KINDS = [["unchanged", "k1"], ["changed", "k2"], ["reshaped", "k3"], ["retyped", "k5"], ["added", "k0"], ["removed", "k4"],
	["kind", "k6"]];

function movement(result) {
	const list = (result.movers || []).slice(0, 12).filter((m) => Number.isFinite(m.rel_l2));
	const most = Math.max(...list.map((m) => m.rel_l2), 1e-12);
	return list.length ? panel("Top movers", h("p", { class: "small" },
		"By the relative L2 distance: 0 is the same, 1 is as far as the tensor is long."),
		h("ul", { class: "movers" }, list.map((m) => h("li", {}, h("bdi", { class: "mono" }, m.path),
			bar(`Relative L2 of ${m.path}`, m.rel_l2, most), h("span", { class: "num" }, number(m.rel_l2)))))) : null;
}

function outcome(job) {
	const r = job.result || {}, t = r.totals?.tensors || {}, u = r.unchanged;
	return [panel("Tensors", h("div", { class: "stats" }, stat("Verdict", r.equal ? "equal" : "different"),
		stat("The same", u ? `${number(Math.round(1000 * (u.share ?? 0)) / 10)} %` : "–", u
			? h("span", { class: "small" }, `${bytes(u.bytes)} of the bytes`) : null),
		stat("Job", jobLink(job.id, "open"))), shares("Tensors", KINDS.map(([label, mark]) => ({ label, mark, value: t[label] || 0 })),
			(n) => String(n))),
	movement(r), r.movers?.length ? panel("All figures", movers(r)) : null, r.differences?.length ? panel("Differences", differences(r))
		: null];
}

export function draw() {
	const options = store.checkpoints.map((c) => `${c.storage}:${c.name}`);
	if ($("compare-names").childElementCount !== Math.min(options.length, 2000)) fill($("compare-names"),
		options.slice(0, 2000).map((value) => h("option", { value })));
	const job = at.a && at.b ? known() : null, p = job?.progress;
	sync($("compare-body"), [at.problem ? h("p", { class: "error" }, at.problem) : null,
		!job ? h("p", { class: "quiet" }, at.a && at.b ? "Not compared yet." : "Choose two checkpoints, of any layouts and formats.")
			: job.state === "succeeded" ? outcome(job) : ENDED.has(job.state) ? h("p", { class: "error" }, job.error?.detail
				|| `The comparison was ${job.state}.`)
				: panel("Comparing", bar("Comparison", p?.bytes_done ?? 0, p?.bytes_total || 1),
					h("p", { class: "small" }, `${job.stage || job.state} · ${Math.floor(percent(p?.bytes_done, p?.bytes_total) ?? 0)} %`))]);
}

export function again(route) {
	at = { a: route.filter.get("a") || "", b: route.filter.get("b") || "", job: "", problem: "" };
	$("compare-a").value = at.a;
	$("compare-b").value = at.b;
	return true;
}

export function mount(root, route, page) {
	redraw = page.draw;
	const input = (id) => h("input", { id, list: "compare-names", spellcheck: "false", class: "mono", placeholder: "main:run1/step-100" });
	root.append(h("h2", { id: "h-compare", tabindex: "-1" }, "Compare"),
		h("form", { class: "panel", "aria-label": "Two checkpoints", submit: (event) => {
			event.preventDefault();
			const a = $("compare-a").value.trim(), b = $("compare-b").value.trim();
			history.replaceState(null, "", `#/compare?a=${encodeURIComponent(a)}&b=${encodeURIComponent(b)}`);
			at = { a, b, job: "", problem: "" };
			compare();
		} }, h("div", { class: "fields" }, field("compare-a", "A, the older one", input("compare-a")),
			field("compare-b", "B, the newer one", input("compare-b"))),
		h("datalist", { id: "compare-names" }), h("button", { type: "submit", class: "primary", "data-act": "compare" }, "Compare")),
		h("div", { id: "compare-body", class: "stack" }));
	again(route);
}
