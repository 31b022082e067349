// reshard.js: writes a checkpoint anew in another layout, format or under other names. While one edits, dry runs say what would come of
// it,
// and the cut before and after stand side by side.

import { checkpointPath, get, post } from "../api/api.js";
import { $, fill, h, sync, text } from "../widgets/dom.js";
import { bytes, number, shape } from "../widgets/format.js";
import { button, checkpointHref, fact, field, panel, plainTable, stat } from "../widgets/parts.js";
import { cut } from "../widgets/cut.js";
import { store } from "../store/store.js";
import { setNote, submit } from "./checkpoint_actions.js";

const PAUSE_MS = 300;
const ROWS = 40;
const FORMATS = ["dcp", "safetensors", "torch", "npz", "gguf"];
export const title = (route) => `Reshard ${route.id}`;

let at = null;
let redraw = () => {};
let timer = 0;

/** World size of the target as text: an empty field means the source's, which load puts into the placeholder, never into the field. */
const worldSize = () => $("to-world").value.trim() || $("to-world").placeholder;

/** The request that the form stands for; throws where it is no request yet. */
function request() {
	const value = (id) => $(id).value.trim(), rules = at.rules.filter((r) => r.match && r.placements);
	const layout = rules.map((r) => ({ match: r.match, placements: r.placements.split(/,(?![^()]*\))/).map((w) => w.trim()).filter(Boolean),
		...(r.mesh && { mesh: r.mesh.split(/[x,]/).map(Number) }), ...(r.optional && { optional: true }) }));
	const target = { storage: value("to-storage"), name: value("to-name"), format: value("to-format") };
	if (worldSize()) target.world_size = Number(worldSize());
	if (layout.length) target.layout = layout;
	const out = { kind: "reshard", source: at.ref, target }, list = (id) => value(id).split(/[\s,]+/).filter(Boolean);
	if (list("to-include").length) out.include = list("to-include");
	if (list("to-exclude").length) out.exclude = list("to-exclude");
	if (value("to-dtype")) out.dtype = [["*", value("to-dtype")]];
	if (value("to-transform")) {
		try {
			out.transform = JSON.parse(value("to-transform"));
		} catch (error) {
			throw new Error(`The rules are no JSON: ${error.message}`);
		}
	}
	if (value("to-vars")) out.vars = Object.fromEntries(value("to-vars").split(/[\s,]+/).map((pair) => pair.split("=")).map(([k, v]) => [k,
		Number(v)]));
	return out;
}

async function preview() {
	const mine = at;
	mine.turn = (mine.turn || 0) + 1;
	const turn = mine.turn;
	let plan = null, problem = null;
	try {
		plan = await post("/v1/jobs?dry_run=true", request());
	} catch (error) {
		problem = error;
	}
	if (mine !== at || turn !== mine.turn) return;
	mine.plan = plan || mine.plan;
	mine.problem = problem;
	mine.stale = !plan;
	text($("announce"), problem ? `The plan is refused: ${problem.message}` : `The plan: ${bytes(plan.bytes)} in ${plan.file_count} files`);
	redraw();
}

function edited() {
	at.turn = (at.turn || 0) + 1;      // an answer on its way is to an older form: preview drops it
	clearTimeout(timer);
	timer = setTimeout(preview, PAUSE_MS);
}

function addRule(rule) {
	at.rules.push(rule);
	drawRules();
}

function drawRules() {
	fill($("rules"), at.rules.map((rule, i) => {
		const input = (key, label, hint) => field(`rule-${i}-${key}`, label, h("input",
			{ id: `rule-${i}-${key}`, value: rule[key] || "", placeholder: hint, spellcheck: "false", class: "mono", input: (event) => {
			rule[key] = event.target.value.trim();
			edited();
		} }));
		return h("div", { class: "rule", role: "group", "aria-label": `Rule ${i + 1}` }, input("match", "Tensors", "model.*"),
			input("placements", "Placements", "Shard(0), Replicate()"), input("mesh", "Mesh", "2x4"),
			button("Remove", `unrule-${i}`, () => {
				at.rules.splice(i, 1);
				drawRules();
				edited();
			}, { "aria-label": `Remove rule ${i + 1}` }));
	}));
}

/** Both cuts of the tensor that was chosen, else of the first one that is cut differently. */
function sideBySide() {
	const cuts = at.plan?.cuts || [];
	if (!at.before.size || !cuts.length) return null;
	const differs = (t) => JSON.stringify((at.before.get(t.fqn)?.chunks || []).map((c) => [c.rank, c.offsets,
		c.sizes])) !== JSON.stringify(t.chunks.map((c) => [c.rank, c.offsets, c.sizes]));
	const after = cuts.find((t) => t.fqn === at.fqn) || cuts.find((t) => at.before.has(t.fqn) && differs(t)) || cuts[0],
		before = at.before.get(after.fqn);
	return panel("Before and after", h("div", { class: "fields" }, field("cut-tensor", "Tensor",
		h("select", { id: "cut-tensor", change: (event) => {
		at.fqn = event.target.value;
		redraw();
	} }, cuts.map((t) => h("option", { selected: t === after, value: t.fqn }, t.fqn))))),
	h("div", { class: "cuts" }, h("figure", {}, h("figcaption", {}, "Now"), before ? cut(before)
		: h("p", { class: "quiet" }, "There is no tensor of this name yet.")),
		h("figure", {}, h("figcaption", {}, "After"), cut(after))));
}

function planned() {
	const p = at.plan;
	if (!p) return null;
	const t = p.transform;
	return [panel(at.stale ? "Plan (of the last request that was valid)" : "Plan",
		h("div", { class: "stats" }, stat("Writes", bytes(p.bytes)), stat("Files", String(p.file_count)),
			stat("World size", String(p.world_size)), stat("Tensors", number(p.tensors)),
		stat("Chunks", number(p.chunks)), stat("Reads", bytes(p.read_bytes)), stat("Over-read", p.over_read_ratio
			? `${p.over_read_ratio.toFixed(2)} ×` : "–"), stat("Memory", bytes(p.peak_memory_bytes))),
	fact([["Rules that take no tensor", p.unmatched_rules?.join(", ")], ["Past their rule", p.fell_back_count
		? `${p.fell_back_count} lack the dim, such as ${p.fell_back[0].fqn}` : null], ["Dropped", p.dropped?.join(", ")]])),
	t ? panel("What the rules make", h("div", { class: "columns" }, [["Before", t.before, t.before_count],
		["After", t.after, t.after_count]].map(([word, list, all]) => h("div", {},
		plainTable(`transform-${word}`, word, [`${word} (${all})`, "Shape", "Dtype"],
			list.slice(0, ROWS).map((x) => [x.fqn, shape(x.shape), x.dtype])))))) : null];
}

export function draw() {
	sync($("reshard-problem"), at.problem ? h("div", { class: "notice bad" }, h("span", {}, at.problem.message),
		h("span", { class: "mono" }, at.problem.body?.pointer || "")) : []);
	sync($("reshard-plan"), [sideBySide(), planned()]);
	$("reshard-go").disabled = Boolean(at.problem) || !at.plan;
}

async function load() {
	const mine = at;
	try {
		const [record, list, sets] = await Promise.all([get(checkpointPath(mine.ref)),
			get(`${checkpointPath(mine.ref, "/tensors")}?page_size=256`), get("/v1/transforms").catch(() => ({ transforms: [] }))]);
		if (mine !== at) return;
		mine.before = new Map((list.tensors || []).map((t) => [t.fqn, t]));
		$("to-world").placeholder = String(record.world_size || 1);
		fill($("to-set"), [h("option", { value: "" }, "none"), sets.transforms.map((s) => h("option", { value: s.name, title: s.description },
			s.name))]);
		mine.sets = sets.transforms;
	} catch (error) {
		mine.problem = error;
	}
	if (mine !== at) return;
	redraw();
	preview();
}

async function takeSet(name) {
	if (!name) $("to-transform").value = "";
	else {
		const mine = at, before = $("to-transform").value, set = await get(`/v1/transforms/${encodeURIComponent(name)}`).catch(() => null);
		if (mine !== at || $("to-set").value !== name || $("to-transform").value !== before) return;
		if (set) {
			$("to-transform").value = JSON.stringify(set.transform, null, 1);
			$("to-vars").value = Object.keys(set.vars || {}).map((k) => `${k}=1`).join(", ");
		}
	}
	edited();
}

export function mount(root, route, page) {
	redraw = page.draw;
	setNote(page.note);
	const i = route.id.indexOf(":"), ref = { storage: route.id.slice(0, i), name: route.id.slice(i + 1) };
	at = { ref, before: new Map(), plan: null, problem: null, stale: false, fqn: "", rules: [], sets: [] };
	const input = (id, more = {}) => h("input", { id, spellcheck: "false", input: edited, ...more });
	fill(root, [h("p", { class: "crumbs" }, h("a", { href: checkpointHref(route.id) }, route.id)),
		h("h2", { id: "h-reshard", tabindex: "-1" }, "Reshard"),
		h("form", { class: "panel", "aria-label": "Reshard", submit: (event) => {
			event.preventDefault();
			submit("reshard it", request());
		} },
		h("div", { class: "fields" }, field("to-storage", "To storage", h("select", { id: "to-storage", change: edited },
			store.storages.map((s) => h("option", { selected: s.name === ref.storage }, s.name)))),
			field("to-name", "As", input("to-name", { value: `${ref.name}-resharded` })),
				field("to-format", "Format", h("select", { id: "to-format", change: edited }, FORMATS.map((f) => h("option", {}, f)))),
			field("to-world", "World size", input("to-world", { type: "number", min: "1", max: "65536" }))),
		h("h3", {}, "Layout"), h("p", { class: "small" },
			"The first rule whose pattern takes a tensor cuts it; without one, dim 0 is shared out over all ranks."), h("div", { id: "rules" }),
		button("Add a rule", "add-rule", () => {
			addRule({ match: "*weight", placements: "Shard(1)", mesh: worldSize() || "2", optional: true });
			edited();
		}),
		h("details", { id: "more-reshard" }, h("summary", {}, "Names, dtypes and conversion rules"),
			h("div", { class: "fields" }, field("to-include", "Only", input("to-include", { placeholder: "model.*" })),
				field("to-exclude", "Not", input("to-exclude", { placeholder: "*.exp_avg*" })),
				field("to-dtype", "Cast to", input("to-dtype", { placeholder: "bfloat16" })),
					field("to-set", "Ready rules", h("select", { id: "to-set", change: (event) => takeSet(event.target.value) })),
				field("to-vars", "Numbers", input("to-vars", { placeholder: "heads=32" }))),
			field("to-transform", "Conversion rules (JSON)", h("textarea", { id: "to-transform", rows: "6", spellcheck: "false", input: edited,
				placeholder: '[{"match": "^model\\\\.(.*)", "rename": "$1"}]' }))),
		h("div", { id: "reshard-problem" }), h("p", { class: "actions" }, h("button",
			{ id: "reshard-go", type: "submit", class: "primary", disabled: true }, "Reshard"))),
		h("div", { id: "reshard-plan", class: "stack" })]);
	drawRules();
	load();
}

export function leave() {
	clearTimeout(timer);
	at = { ...at, turn: -1 };
}
