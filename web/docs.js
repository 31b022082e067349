// The API's page: openapi.yaml, which the daemon has inside, as something to read. Text goes into the page as text, never as HTML.
const $ = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
	const e = document.createElement(tag);
	for (const [k, v] of Object.entries(attributes))
		e.setAttribute(k, v);
	e.append(...children.filter((c) => c !== null && c !== undefined));
	return e;
}

let contract;

function resolve(x) {
	for (let n = 0; x && x.$ref && n < 20; n++)
		x = x.$ref.split("/").slice(1).reduce((at, key) => at && at[key], contract);
	return x || {};
}

// `code` in backquotes becomes code.
function prose(text) {
	const p = make("p");
	(text || "").split("`").forEach((part, i) => p.append(i % 2 ? make("code", {}, part) : part));
	return p;
}

// A schema as people write it: {"name": string, "slots": integer from 1 to 16, …}. Deep ones end at `…`.
function form(schema, depth = 0, indent = "") {
	const named = schema && schema.$ref ? schema.$ref.split("/").pop() : "";
	const s = resolve(schema);
	const choices = s.oneOf || s.anyOf;
	if (s.const !== undefined)
		return JSON.stringify(s.const);
	if (s.enum)
		return s.enum.map((v) => JSON.stringify(v)).join(" | ");
	if (depth > 3 && (s.properties || s.items || choices))
		return named || "…";
	if (choices)
		return choices.map((c) => form(c, depth + 1, indent)).join(" | ");
	if (s.properties) {
		const inner = indent + "  ";
		const rows = Object.entries(s.properties).map(([k, v]) => {
			const needed = (s.required || []).includes(k) ? "" : "?";
			return `${inner}${JSON.stringify(k)}${needed}: ${form(v, depth + 1, inner)}`;
		});
		return `{\n${rows.join(",\n")}\n${indent}}`;
	}
	if (s.items)
		return `[${form(s.items, depth + 1, indent)}, …]`;
	const type = Array.isArray(s.type) ? s.type.join(" or ") : s.type || "anything";
	const from = s.minimum !== undefined ? ` from ${s.minimum}` : "";
	const to = s.maximum !== undefined && s.maximum < 2 ** 53 ? ` to ${s.maximum}` : "";
	const fallback = s.default !== undefined ? ` (${JSON.stringify(s.default)})` : "";
	return `${type}${from}${to}${fallback}`;
}

// A value to show for a parameter: its own example, else one that its schema allows.
function sample(p) {
	const s = resolve(p.schema);
	const known = { id: "01J8Z3T5Q2M4N6P8R0S1V3W5X7", fqn: "model.w", rank: 0, policy: "night", webhook: "board", chain: "to-hf",
		alias: "best", state_dict: "train", storage: "main" };
	const given = p.example ?? s.example ?? (s.examples && s.examples[0]) ?? s.default ?? known[p.name];
	if (given !== undefined)
		return given;
	return s.enum ? s.enum[0] : s.type === "integer" ? s.minimum ?? 1 : p.name === "name" ? "train" : "x";
}

function examplesOf(content) {
	if (content.example !== undefined)
		return [["", content.example]];
	return Object.entries(content.examples || {}).map(([name, e]) => [name, resolve(e).value]);
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// A line for a shell. Both forms say where the daemon is in variables, which the page's head explains.
function curl(op, body) {
	let path = op.path;
	const query = [];
	for (const p of op.parameters) {
		if (p.in === "path")
			path = path.replace(`{${p.name}}`, encodeURIComponent(sample(p)));
		else if (p.in === "query" && p.required)
			query.push(`${p.name}=${encodeURIComponent(sample(p))}`);
	}
	const tcp = document.querySelector("input[name=over]:checked").value === "tcp";
	const words = ["curl", "-sS"];
	if (tcp)
		words.push("-H", '"Authorization: Bearer $DCPD_TOKEN"');
	else
		words.push("--unix-socket", '"$DCPD_SOCKET"');
	if (op.method !== "GET")
		words.push("-X", op.method);
	if (op.path.endsWith("/events"))
		words.push("-N");
	if (op.path.endsWith("/{fqn}"))
		words.push("-o", "tensor.bin");
	words.push(quoted(`${tcp ? location.origin : "http://dcpd"}${path}${query.length ? "?" + query.join("&") : ""}`));
	if (body !== undefined)
		words.push("-H", quoted("Content-Type: application/json"), "-d", quoted(JSON.stringify(body)));
	return words.join(" ");
}

function curlBox(op, body) {
	const text = make("pre", { class: "command" });
	const copy = make("button", { type: "button", "aria-label": `copy the command for ${op.method} ${op.path}` }, "copy");
	const show = () => { text.textContent = curl(op, body); };
	copy.addEventListener("click", async () => {
		await navigator.clipboard.writeText(text.textContent);
		copy.textContent = "copied";
	});
	document.querySelectorAll("input[name=over]").forEach((i) => i.addEventListener("change", show));
	show();
	return make("div", { class: "curl" }, text, copy);
}

function table(rows) {
	return make("table", {}, make("tbody", {}, ...rows.map(([a, ...rest]) =>
		make("tr", {}, make("th", { scope: "row" }, make("code", {}, a)), make("td", {}, ...rest)))));
}

function requestPart(op) {
	const content = resolve(op.requestBody).content?.["application/json"];
	if (!content)
		return [curlBox(op)];
	const examples = examplesOf(content);
	const boxes = (examples.length ? examples : [["", {}]]).flatMap(([name, value]) =>
		[name ? make("p", { class: "quiet" }, name) : null, curlBox(op, value)]);
	return [...boxes, make("details", {}, make("summary", {}, "the body's form"), make("pre", {}, form(content.schema)))];
}

function answerPart(op) {
	return Object.entries(op.responses).filter(([status]) => status !== "default").map(([status, r]) => {
		const answer = resolve(r);
		const box = make("div", {}, make("p", {}, make("strong", {}, status), " ", answer.description || ""));
		for (const [type, content] of Object.entries(answer.content || {})) {
			box.append(make("p", { class: "quiet" }, type));
			for (const [, value] of examplesOf(content))
				box.append(make("pre", {}, typeof value === "string" ? value : JSON.stringify(value, null, 2)));
			if (type.includes("json") && resolve(content.schema).type !== "string")
				box.append(make("details", {}, make("summary", {}, "its form"), make("pre", {}, form(content.schema))));
		}
		return box;
	});
}

function section(op) {
	const problems = op["x-problems"] || [];
	return make("section", { id: op.operationId, "aria-labelledby": `${op.operationId}-title` },
		make("h2", { id: `${op.operationId}-title` }, make("span", { class: "method" }, op.method), make("code", {}, op.path)),
		prose(op.summary), op.description ? prose(op.description) : null,
		...requestPart(op),
		op.parameters.length ? make("h3", {}, "parameters") : null,
		op.parameters.length ? table(op.parameters.map((p) =>
			[p.name, make("span", { class: "quiet" }, `${p.in}${p.required ? "" : ", optional"} `), prose(p.description)])) : null,
		make("h3", {}, "answers"), ...answerPart(op),
		problems.length ? make("p", { class: "quiet" }, "errors to expect: ", problems.join(", ")) : null);
}

function operations() {
	return Object.entries(contract.paths).flatMap(([path, { parameters = [], ...methods }]) => Object.entries(methods).map(([method, op]) =>
		({ ...op, path, method: method.toUpperCase(), parameters: [...parameters, ...(op.parameters || [])].map(resolve) })));
}

function find(all) {
	const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
	for (const op of all) {
		const text = JSON.stringify(op).toLowerCase();
		op.section.hidden = op.entry.hidden = !words.every((w) => text.includes(w));
	}
	const shown = all.filter((op) => !op.section.hidden).length;
	$("state").textContent = `${shown} of ${all.length} operations`;
}

function introduction() {
	return make("section", { id: "about", "aria-label": "About" }, prose(contract.info.description),
		make("pre", {}, "DCPD_SOCKET=$HOME/.local/state/dcpd/dcpd.sock     # a system service's: /run/dcpd/dcpd.sock\n" +
			"DCPD_TOKEN=$(cat $HOME/.local/state/dcpd/token)   # over TCP"),
		make("p", {}, "The whole contract: ", make("a", { href: "/docs/openapi.yaml" }, "openapi.yaml"), "."));
}

async function start() {
	const answer = await fetch("/docs/openapi.yaml");
	if (!answer.ok)
		throw new Error(`/docs/openapi.yaml: ${answer.status}`);
	contract = globalThis.jsyaml.load(await answer.text());
	const all = operations();
	let group = "";
	$("operations").append(introduction());
	for (const op of all) {
		const name = op.path.split("/")[2] || "the daemon";
		if (name !== group)
			$("contents").append(make("h2", {}, name));
		group = name;
		op.entry = make("a", { href: `#${op.operationId}`, title: op.summary }, `${op.method} ${op.path.replace(/^\/v1/, "")}`);
		op.section = section(op);
		$("contents").append(op.entry);
		$("operations").append(op.section);
	}
	$("find").addEventListener("input", () => find(all));
	find(all);
	if (location.hash)
		document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

start().catch((e) => { $("state").textContent = `the contract cannot be shown: ${e.message}`; });
