// jobs.js: the list of jobs, as it moves.

import { $, address, h, pager, remember, rows } from "../widgets/dom.js";
import { percent, what } from "../widgets/format.js";
import { bar, errorLine, jobLink, numbers, state, table, when } from "../widgets/parts.js";
import { ENDED, jobsInOrder, moreJobs, store } from "../store/store.js";
import { action, setReport, summary } from "./job_actions.js";

const PAGE = 50;
const RANKS_IN_LIST = 8;
const STATES = ["active", "queued", "planning", "running", "committing", "succeeded", "failed", "cancelled"];

const view = { page: 0, text: "", words: "", state: "" };
let redraw = () => {};

function haystack(job) {
	const error = job.error || {};
	return [job.id, job.kind, what(job), ...Object.entries(job.labels || {}).flat(), error.code, error.fqn, error.file, error.detail]
		.filter(Boolean).join("\n").toLowerCase();
}

function matches(job) {
	if (view.state === "active" ? ENDED.has(job.state) : view.state && job.state !== view.state) return false;
	return !view.text || haystack(job).includes(view.text);
}

export function rankList(job, most) {
	const ranks = job.progress?.ranks || [];
	if (ranks.length === 0) return null;
	const rest = ranks.length - most;
	return h("ul", { class: "ranks", "aria-label": "Progress per rank" },
		ranks.slice(0, most).map((r) => h("li", { "data-rank": r.rank },
			`rank ${r.rank}`, bar(`Rank ${r.rank}`, r.bytes_done, r.bytes_total),
			`${Math.floor(percent(r.bytes_done, r.bytes_total) ?? 0)} %`)),
		rest > 0 ? h("li", {}, `and ${rest} more`) : null);
}

function progressCell(job) {
	const p = job.progress;
	if (job.state === "failed" && job.error) return errorLine(job.error);
	if (ENDED.has(job.state)) return h("span", { class: "small" }, summary(job));
	if (!p || !(p.bytes_total > 0)) return h("span", { class: "small" }, job.stage || "waiting");
	return [bar(`Job ${job.id}`, p.bytes_done, p.bytes_total),
		h("div", { class: "small" }, job.stage ? `${job.stage} · ` : "", numbers(p)), rankList(job, RANKS_IN_LIST)];
}

export function draw() {
	const filtered = Boolean(view.text || view.state);
	const found = filtered ? jobsInOrder().filter(matches) : jobsInOrder();
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
			draw();
		} });
}

const filter = () => ({ text: $("jobs-text").value.trim(), state: view.state, page: view.page ? String(view.page + 1) : "" });

function take() {
	view.words = $("jobs-text").value.trim();
	view.text = view.words.toLowerCase();
	view.state = $("jobs-state").value;
}

/** The address of the list as it was last filtered: the way back from a job. */
export const back = () => address("jobs", { text: view.words, state: view.state, page: view.page ? String(view.page + 1) : "" });

/** Filters the list as the address says. */
export function again(route) {
	$("jobs-text").value = route.filter.get("text") || "";
	$("jobs-state").value = route.filter.get("state") || "";
	if ($("jobs-state").selectedIndex < 0) $("jobs-state").value = "";
	take();
	view.page = Math.max(0, (Number.parseInt(route.filter.get("page"), 10) || 1) - 1);
	return true;
}

function update() {
	take();
	view.page = 0;
	remember("jobs", filter());
	redraw();
}

export function mount(root, route, page) {
	redraw = page.draw;
	setReport(page.note);
	root.append(h("h2", { id: "h-jobs", tabindex: "-1" }, "Jobs"),
		h("form", { class: "filters", role: "search", "aria-label": "Filter jobs", submit: (event) => event.preventDefault(),
			reset: () => setTimeout(update) },
			h("label", { for: "jobs-text" }, "Text"),
			h("input", { id: "jobs-text", type: "search", placeholder: "id, kind, name, label, error", spellcheck: "false", input: update }),
			h("span", { class: "pair" }, h("label", { for: "jobs-state" }, "State"),
				h("select", { id: "jobs-state", change: update }, h("option", { value: "" }, "any"), STATES.map((word) => h("option", {}, word)))),
			h("button", { id: "jobs-clear", type: "reset" }, "Clear")),
		table("jobs", "Jobs table", ["Job", "What", "State", "Progress", "Created", "Action"]),
		h("div", { id: "jobs-pager", class: "pager" }));
	again(route);
}
