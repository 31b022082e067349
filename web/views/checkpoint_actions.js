// checkpoint_actions.js: what can be done to a checkpoint: hold, alias, delete, verify, load, export. Each asks first and says what it
// does.

import { call, checkpointPath, get, post, runPath } from "../api/api.js";
import { confirm, h } from "../widgets/dom.js";
import { bytes } from "../widgets/format.js";
import { field, jobHref } from "../widgets/parts.js";
import { lastPart } from "../store/health.js";
import { fate, runsChanged } from "../store/runs.js";
import { putJob, refresh, store } from "../store/store.js";

let note = () => {};
export function setNote(say) {
	note = say;
}

const words = (ref) => `${ref.storage}:${ref.name}`;
const runOf = (name) => (name.includes("/") ? name.slice(0, name.lastIndexOf("/")) : "-");

async function attempt(what, work) {
	try {
		return await work();
	} catch (error) {
		note(`Could not ${what}: ${error.message}`);
		return null;
	}
}

/** Submits a job and opens it. */
export async function submit(what, request) {
	const job = await attempt(what, () => post("/v1/jobs", request));
	if (!job) return;
	putJob(job);
	location.hash = jobHref(job.id);
}

export async function holdAsk(ref, held, after) {
	const reason = h("input", { id: "hold-reason", maxlength: "1000", value: "kept by hand" });
	if (held) {
		if (!(await confirm(`Lift the hold of ${words(ref)}?`, "Retention may remove it then.", "Yes, lift it"))) return;
		await attempt("lift the hold", () => call("DELETE", checkpointPath(ref, "/hold")));
	} else {
		if (!(await confirm(`Hold ${words(ref)}?`, "No policy, delete or overwrite takes it while it is held.", "Hold it",
			[field("hold-reason", "Reason", reason)]))) return;
		await attempt("hold it", () => call("PUT", checkpointPath(ref, "/hold"), { reason: reason.value.trim() || "kept by hand" }));
	}
	after?.();
	refresh("policies");
	runsChanged();
	refresh("runs");
}

export async function aliasAsk(ref, aliases, after) {
	const own = Object.keys(aliases || {}).filter((a) => !a.startsWith("latest"));
	const input = h("input", { id: "alias-name", value: own[0] || "best", maxlength: "64", list: "alias-names", spellcheck: "false" });
	const more = [field("alias-name", "Alias", input, own.length ? `There are ${own.join(", ")}.` : "There is none yet."),
		h("datalist", { id: "alias-names" }, own.map((a) => h("option", { value: a })))];
	if (!(await confirm(`Let an alias lead to ${words(ref)}?`,
		`A reference ${ref.storage}:${runOf(ref.name)}@ALIAS then means this checkpoint.`, "Set it", more))) return;
	const name = input.value.trim();
	await attempt(`set the alias ${name}`, () => call("PUT", runPath(ref.storage, runOf(ref.name), `/aliases/${encodeURIComponent(name)}`),
		{ name: ref.name, if: aliases?.[name] ?? null }));
	after?.();
	refresh("policies");
	runsChanged();
	refresh("runs");
}

/** Deletes after it has said what goes: bytes, aliases that dangle, what was made of it, and whether it may come back. */
export async function deleteAsk(ref, after) {
	const [record, lineage, run] = await Promise.all([get(checkpointPath(ref)).catch(() => null),
		get(checkpointPath(ref, "/lineage")).catch(() => null),
		get(runPath(ref.storage, runOf(ref.name), "?page_size=1")).catch(() => null)]);
	const children = (lineage?.edges || []).filter((e) => e.parent === words(ref)).map((e) => `${e.child} (${e.role})`);
	const aliases = Object.entries(run?.aliases || {}).filter(([a, name]) => name === ref.name && !a.startsWith("latest")).map(([a]) => a);
	const f = fate(store.policies, ref.storage, ref.name);
	const shared = record?.bytes_shared ? `, of which ${bytes(record.bytes_shared)} are shared with others and free nothing` : "";
	const list = [record ? `${bytes(record.bytes)} in ${record.files ?? "its"} files${shared}` : null,
		aliases.length ? `alias ${aliases.join(", ")} leads nowhere then` : null, run?.aliases?.latest === ref.name
			? "it is the newest checkpoint of the run" : null,
		record?.hold ? `it is held: ${record.hold.reason}` : null, children.length ? `made of it: ${children.slice(0, 4).join(", ")}; they stay`
			: null,
		f?.stays ? `retention would keep it: ${f.stays.join(", ").replaceAll("_", " ")}` : null].filter(Boolean);
	const hours = h("select", { id: "delete-trash" }, h("option", { value: "72h" }, "3 days in the trash"),
		h("option", { value: "30d" }, "30 days in the trash"), h("option", { value: "" }, "for good, at once"));
	const more = [h("ul", { id: "delete-goes" }, list.map((line) => h("li", {}, line))), field("delete-trash", "Where it goes", hours)];
	if (!(await confirm(`Delete ${words(ref)}?`, "What goes with it:", "Yes, delete it", more))) return;
	const trash = hours.value;
	const job = await attempt(`delete ${words(ref)}`, () => call("DELETE", checkpointPath(ref, trash ? `?trash=${trash}` : "")));
	if (job?.id) {
		putJob(job);
		const ended = await attempt(`delete ${words(ref)}`, () => get(`/v1/jobs/${encodeURIComponent(job.id)}?wait=20s`));
		if (ended?.state === "failed") note(`${words(ref)} was not deleted: ${ended.error?.detail || ended.error?.title}`);
		else note(trash ? `${lastPart(ref.name)} is in the trash of ${ref.storage}: Storages brings it back.`
			: `${lastPart(ref.name)} is gone.`);
	}
	refresh("checkpoints");
	refresh("policies");
	after?.();
}

export async function verifyAsk(ref) {
	const level = h("select", { id: "verify-level" }, h("option", { value: "digest" }, "digests: every byte is compared"),
		h("option", { value: "structure" }, "structure: sizes and coverage"), h("option", { value: "values" }, "values: NaN and Inf too"));
	if (!(await confirm(`Verify ${words(ref)}?`, "It reads the checkpoint and changes nothing.", "Verify it",
		[field("verify-level", "Level", level)]))) return;
	await submit("verify it", { kind: "verify", source: ref, level: level.value });
}

export async function loadAsk(ref, worldSize) {
	const name = h("input", { id: "load-name", value: lastPart(ref.name).replace(/[/:]/g, "-") }),
		world = h("input", { id: "load-world", type: "number", min: "1", max: "65536", value: String(worldSize || 1) });
	if (!(await confirm(`Load ${words(ref)} into shared memory?`, "It stays there until it is deleted.", "Load it",
		[h("div", { class: "fields" }, field("load-name", "State dict", name), field("load-world", "World size", world))]))) return;
	await submit("load it", { kind: "load", source: ref, target: { state_dict: name.value.trim(), world_size: Number(world.value) } });
}

const FORMATS = { safetensors: "Hugging Face safetensors", torch: "one torch.save file (.pt)", npz: "NumPy (.npz)",
	gguf: "GGUF (.gguf)" };
const ENDS = { torch: ".pt", npz: ".npz", gguf: ".gguf", safetensors: "" };

export async function exportAsk(ref) {
	const format = h("select", { id: "export-format", change: () => { name.value = `${base}${ENDS[format.value]}`; } },
		Object.entries(FORMATS).map(([k, v]) => h("option", { value: k }, v)));
	const storage = h("select", { id: "export-storage" }, store.storages.map((s) => h("option", { selected: s.name === ref.storage },
		s.name))), base = `${ref.name}-export`;
	const name = h("input", { id: "export-name", value: base, spellcheck: "false" });
	if (!(await confirm(`Export ${words(ref)}?`, "It becomes a new checkpoint; this one stays.", "Export it",
		[h("div", { class: "fields" }, field("export-format", "Format", format), field("export-storage", "Storage", storage)),
			field("export-name", "Name", name)]))) return;
	await submit("export it", { kind: "reshard", source: ref, target: { storage: storage.value, name: name.value.trim(),
		format: format.value } });
}
