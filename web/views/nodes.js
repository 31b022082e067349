// nodes.js: the daemons of a cluster: which are here, what each runs, and a way to give one no new work.

import { post } from "../api/api.js";
import { $, confirm, h, rows, sync } from "../widgets/dom.js";
import { button, state, table } from "../widgets/parts.js";
import { refresh, store } from "../store/store.js";

const MARKS = { joined: "ok", draining: "warn", drained: "idle", away: "bad" };
const VERBS = { drain: ["Drain", "Yes, drain it"], undrain: ["Undrain", "Undrain it"], forget: ["Forget", "Yes, forget it"] };
let note = () => {};

async function drain(name, verb) {
	const words = verb === "forget"
		? "It is no longer shown. Its jobs that no other node can take over have failed. If it comes back all the same, it joins anew."
		: verb === "drain"
		? "It gets no new work, over restarts too, until that is lifted. What it has ends; saves of its own trainers are still taken."
		: "It gets work again.";
	const [title, yes] = VERBS[verb];
	if (!(await confirm(`${title} node ${name}?`, words, yes))) return;
	try {
		await post(`/v1/nodes/${encodeURIComponent(name)}:${verb}`);
	} catch (error) {
		note(`Could not ${verb} node ${name}: ${error.message}`);
	}
	refresh("nodes");
}

export function draw() {
	const { node, problem, nodes } = store.nodes;
	sync($("nodes-problem"), problem ? h("div", { class: "notice bad" },
		h("span", {}, `This node, ${node}: ${problem}`)) : []);
	rows($("nodes").tBodies[0], nodes, (n) => n.name, (n) => [
		h("th", { scope: "row", class: "name" }, h("b", { class: "mono" }, n.name), n.name === node ? h("span", { class: "small" },
			" answers here") : null),
		h("td", {}, state(MARKS[n.state] || "idle", n.state)),
		h("td", { class: "mono" }, n.advertise),
		h("td", { class: "num" }, n.jobs ?? "–"),
		h("td", {}, (n.storages || []).join(", ") || "–"),
		h("td", {}, n.version || "–"),
		h("td", {}, n.state === "joined" ? button("Drain …", `drain-${n.name}`, () => drain(n.name, "drain"),
			{ "aria-label": `Drain ${n.name}` })
			: n.state === "away" ? button("Forget …", `drain-${n.name}`, () => drain(n.name, "forget"), { "aria-label": `Forget ${n.name}` })
			: button("Undrain …", `drain-${n.name}`, () => drain(n.name, "undrain"),
				{ "aria-label": `Undrain ${n.name}` })),
	], "This daemon is in no cluster.");
}

export function mount(root, route, page) {
	note = page.note;
	root.append(h("h2", { id: "h-nodes", tabindex: "-1" }, "Nodes"), h("div", { id: "nodes-problem" }),
		table("nodes", "Nodes table", ["Node", "State", "Address", ["Jobs", "num"], "Storages", "Version", "Action"]));
	refresh("nodes");
}
