// api.js: requests to the daemon with the token, answers as objects, problems as exceptions.
//
// The token comes in the address as #token=… (what dcpd and quickstart print). A fragment is never sent to a server; it is taken
// out of the address bar and the history at once and kept for this tab only.

const KEY = "dcpd-token";

export class Problem extends Error {
	constructor(status, body) {
		super(body.detail || body.title || `HTTP ${status}`);
		this.status = status;
		this.body = body;
		this.code = body.code || `http_${status}`;
	}
}

/** The daemon cannot be reached: network error, or a time-out. */
export class Unreachable extends Error {}

export function takeToken() {
	const found = /^#(?:.*&)?token=([^&]*)/.exec(location.hash);
	if (found) {
		setToken(decodeURIComponent(found[1]));
		history.replaceState(null, "", location.pathname + location.search);
	}
	return token();
}

export const token = () => sessionStorage.getItem(KEY) || "";

export function setToken(value) {
	if (value) sessionStorage.setItem(KEY, value);
	else sessionStorage.removeItem(KEY);
}

export const headers = (extra) => ({ Authorization: `Bearer ${token()}`, ...extra });

let refused = () => {};
/** Names what is done when the daemon does not know the token any more. */
export function onRefused(then) {
	refused = then;
}

async function problem(response) {
	let body = {};
	try {
		body = await response.json();
	} catch {
		/* not from the daemon, or cut short: the status has to do */
	}
	if (response.status === 401) refused();
	return new Problem(response.status, body && typeof body === "object" ? body : {});
}

export async function call(method, path, body) {
	const init = { method, headers: headers({ Accept: "application/json" }), cache: "no-store" };
	init.signal = AbortSignal.timeout(30000);
	if (method === "POST" || method === "PUT") {
		init.headers["Content-Type"] = "application/json";
		if (method === "POST") init.headers["Idempotency-Key"] = crypto.getRandomValues(new Uint32Array(4)).join("-");
		init.body = JSON.stringify(body || {});
	}
	let response;
	try {
		response = await fetch(path, init);
	} catch (error) {
		throw new Unreachable(error.message);
	}
	if (!response.ok) throw await problem(response);
	try {
		return response.status === 204 ? {} : await response.json();
	} catch (error) {
		throw new Unreachable(error.message);
	}
}

export const get = (path) => call("GET", path);
export const post = (path, body) => call("POST", path, body);

/** "/v1/checkpoints/STORAGE/NAME" of {storage, name}. */
export const checkpointPath = (ref, tail = "") =>
	`/v1/checkpoints/${encodeURIComponent(ref.storage)}/${encodeURIComponent(ref.name)}${tail}`;
export const runPath = (storage, run, tail = "") => `/v1/runs/${encodeURIComponent(storage)}/${encodeURIComponent(run)}${tail}`;

/** A tensor's bytes: {bytes, dtype, shape}. */
export async function bytesOf(path) {
	let response;
	try {
		response = await fetch(path, { headers: headers({}), cache: "no-store", signal: AbortSignal.timeout(30000) });
	} catch (error) {
		throw new Unreachable(error.message);
	}
	if (!response.ok) throw await problem(response);
	return { bytes: await response.arrayBuffer(), dtype: response.headers.get("X-Dcpd-Dtype") || "",
		shape: JSON.parse(response.headers.get("X-Dcpd-Shape") || "[]") };
}

/** One page of a list: {items, next}. size 0: as many as the daemon gives. */
export async function page(path, member, size, next, more = "") {
	const query = [more, size ? `page_size=${size}` : "", next ? `page_token=${encodeURIComponent(next)}` : ""].filter(Boolean).join("&");
	const body = await get(query ? `${path}?${query}` : path);
	const items = body[member];
	return { items: Array.isArray(items) ? items : [], next: body.next_page_token || "" };
}

/** All pages, up to `limit` items. */
export async function all(path, member, limit, size = 500) {
	const items = [];
	let next = "";
	do {
		const part = await page(path, member, size, next);
		items.push(...part.items);
		next = part.next;
	} while (next && items.length < limit);
	return items;
}
