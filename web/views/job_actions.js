// job_actions.js: what can be done to a job from its row or its view, and what came of it in a line.

import { post } from "../api/api.js";
import { confirm, h } from "../widgets/dom.js";
import { bytes, seconds, what } from "../widgets/format.js";
import { ENDED, fetchJob, jobById, putJob } from "../store/store.js";

let report = () => {};
export function setReport(note) {
	report = note;
}

export const took = (job) => (Date.parse(job.finished_at) - Date.parse(job.started_at)) / 1000;

/** In words: do the two sides of a diff or a compare agree? */
export function verdict(result) {
	if (result.equal) return "equal";
	const n = result.difference_count ?? (result.differences || []).length;
	return `${n} difference${n === 1 ? "" : "s"}`;
}

export function summary(job) {
	const s = took(job), n = job.progress?.bytes_done;
	const parts = typeof job.result?.equal === "boolean" ? [verdict(job.result)] : [];
	if (n > 0) parts.push(bytes(n));
	if (s >= 0) parts.push(seconds(s));
	if (n > 0 && s > 0.001) parts.push(`${bytes(n / s)}/s`);
	return parts.join(" · ") || "–";
}

/** Cancel for what is under way, retry for what may go better another time. While committing there is no way back: no button. */
export function action(job) {
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
