// audit.js: who deleted, moved an alias, changed a policy: the daemon's own record, newest first.

import { page as pageOf } from "../api/api.js";
import { $, fill, h, remember, rows, text } from "../widgets/dom.js";
import { button, checkpointHref, jobLink, table, when } from "../widgets/parts.js";

const PAGE = 200;
const ACTIONS = ["checkpoint.delete", "checkpoint.undelete", "alias.move", "alias.remove", "hold.set", "hold.lift", "policy.set",
	"policy.remove", "chain.set",
	"chain.remove", "webhook.set", "webhook.remove", "storage.add", "state_dict.remove", "device_image.keep", "device_image.drop"];

let at = null;                       // {list, next, why, busy}
let filter = { text: "", action: "" };
let redraw = () => {};

async function more(first) {
	const mine = at;
	if (mine.busy) return;
	mine.busy = true;
	try {
		const got = await pageOf("/v1/audit", "audit", PAGE, first ? "" : mine.next);
		mine.list = first ? got.items : [...mine.list, ...got.items];
		mine.next = got.next;
		mine.why = "";
	} catch (error) {
		mine.why = error.message;
	}
	mine.busy = false;
	if (mine === at) redraw();
}

/** Who it was: a policy by itself, the holder of a token, or a user over the Unix socket. */
function who(a) {
	if (a.policy) return [`policy ${a.policy}`, h("div", { class: "small" }, `for uid ${a.uid}`)];
	return a.token ? [`token ${a.token}`, h("div", { class: "small" }, `uid ${a.uid}`)] : `uid ${a.uid}`;
}

const subject = (a) => (/^(checkpoint|hold)\./.test(a.action) && a.action !== "checkpoint.delete" && a.subject.includes(":")
	? h("a", { href: checkpointHref(a.subject), "data-act": `subject-${a.id}` }, h("bdi", { class: "mono" }, a.subject)) : h("bdi",
		{ class: "mono" }, a.subject));

const matches = (a) => (!filter.action || a.action === filter.action)
	&& (!filter.text || JSON.stringify([a.subject, a.token, a.policy, a.job,
		`uid ${a.uid}`]).toLowerCase().includes(filter.text.toLowerCase()));

export function draw() {
	const found = at.list.filter(matches);
	rows($("audit").tBodies[0], found, (a) => a.id, (a) => [
		h("th", { scope: "row" }, when(a.time), h("div", { class: "small" }, a.time.slice(0, 19).replace("T", " "))),
		h("td", {}, who(a)), h("td", { class: "nowrap" }, a.action), h("td", { class: "name" }, subject(a)),
			h("td", {}, a.job ? jobLink(a.job) : "–"),
		h("td", {}, a.request ? h("details", { id: `asked-${a.id}` }, h("summary", {}, "Request"),
			h("pre", {}, JSON.stringify(a.request, null, 1))) : "–"),
	], at.why || (at.busy ? "Looking …" : at.list.length ? "Nothing matches." : "Nothing has happened yet."));
	text($("audit-count"), at.why ? ""
		: `${found.length} of the newest ${at.list.length}${at.next ? "; there are older ones" : ", which is all"}.`);
	$("audit-more").hidden = !at.next;
}

export function again(route) {
	filter = { text: route.filter.get("text") || "", action: route.filter.get("action") || "" };
	$("audit-text").value = filter.text;
	$("audit-action").value = filter.action;
	return true;
}

export function mount(root, route, page) {
	redraw = page.draw;
	at = { list: [], next: "", why: "", busy: false };
	const changed = (key) => (event) => {
		filter[key] = event.target.value.trim();
		remember("audit", filter);
		redraw();
	};
	fill(root, [h("h2", { id: "h-audit", tabindex: "-1" }, "Audit"),
		h("form", { class: "filters", role: "search", "aria-label": "Filter the audit", submit: (event) => event.preventDefault() },
			h("label", { for: "audit-text" }, "Text"), h("input", { id: "audit-text", type: "search",
				placeholder: "name, token, policy, job", spellcheck: "false",
				input: changed("text") }),
			h("span", { class: "pair" }, h("label", { for: "audit-action" }, "Action"),
				h("select", { id: "audit-action", change: changed("action") },
					h("option", { value: "" }, "all"), ACTIONS.map((a) => h("option", {}, a))))),
		table("audit", "Audit table", ["When", "Who", "Action", "What", "Job", "Asked"]),
		h("p", { class: "pager" }, h("span", { id: "audit-count", class: "small" }), button("Older ones", "audit-older",
			() => more(false), { id: "audit-more" }))]);
	again(route);
	more(true);
}
