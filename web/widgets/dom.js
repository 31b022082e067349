// dom.js: elements out of data, and tables that change row by row.
//
// Data (names, FQNs, messages) comes from files of strangers, so it only ever becomes a text node or an attribute that
// cannot run: there is no innerHTML anywhere in this folder.

const REMEMBER_MS = 250;

export const $ = (id) => document.getElementById(id);

/** h("td", {class: "num"}, "text", node, …): an element; null children are left out. */
export function h(tag, props, ...children) {
	const node = document.createElement(tag);
	for (const [key, value] of Object.entries(props || {})) {
		if (value === null || value === undefined || value === false) continue;
		if (typeof value === "function") node.addEventListener(key, value);
		else node.setAttribute(key, value === true ? "" : value);
	}
	fill(node, children);
	return node;
}

const SVG = "http://www.w3.org/2000/svg";

/** The same as h for parts of a drawing. */
export function svg(tag, props, ...children) {
	const node = document.createElementNS(SVG, tag);
	for (const [key, value] of Object.entries(props || {})) {
		if (value === null || value === undefined || value === false) continue;
		if (typeof value === "function") node.addEventListener(key, value);
		else node.setAttribute(key, value === true ? "" : String(value));
	}
	fill(node, children);
	return node;
}

/** Sets properties of style: the page's policy forbids the attribute in markup, and allows this. */
export function styled(node, properties) {
	for (const [key, value] of Object.entries(properties)) node.style.setProperty(key, value);
	return node;
}

/** Gives node these children and no others. */
export function fill(node, children) {
	const list = [children].flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false);
	node.replaceChildren(...list.map((c) => (c instanceof Node ? c : document.createTextNode(String(c)))));
	return node;
}

/** Sets text only when it differs: untouched nodes keep selection and do not disturb screen readers. */
export function text(node, value) {
	if (node.textContent !== value) node.textContent = value;
}

/**
 * Gives node new children, but keeps every old one that looks the same. So a live update leaves buttons, selections and focus
 * alone unless they changed; focus in a replaced part goes to the control of the same name (data-act). Listeners are not
 * compared: handlers must look their data up by id when they run.
 */
export function sync(node, children) {
	const list = [children].flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false);
	const act = node.contains(document.activeElement) && document.activeElement.dataset?.act;
	list.forEach((fresh, i) => {
		let old = node.children[i];
		if (fresh.id && old && old.id !== fresh.id) {       // something came or went before it
			const moved = [...node.children].find((c) => c.id === fresh.id);
			if (moved) node.insertBefore(old = moved, node.children[i]);
		}
		if (!old) node.append(fresh);
		else {
			if (fresh.tagName === "DETAILS" && old.tagName === "DETAILS" && old.id === fresh.id) fresh.open = old.open;
			if (!old.isEqualNode(fresh)) old.replaceWith(fresh);
		}
	});
	while (node.children.length > list.length) node.lastElementChild.remove();
	if (act && !node.contains(document.activeElement)) node.querySelector(`[data-act="${CSS.escape(act)}"]`)?.focus();
}

/**
 * Gives cells what a narrow screen needs, where a row is a card and the head is out of sight: the column's name in front, and
 * the roles, which browsers take from elements of another `display`.
 */
function labelled(cells, heads) {
	cells.forEach((cell, i) => {
		cell.setAttribute("role", cell.tagName === "TH" ? "rowheader" : "cell");
		if (heads[i]) cell.dataset.label = heads[i];
	});
	return cells;
}

/** Makes tbody show items, one row each, found again by key; build(item) returns the cells. */
export function rows(tbody, items, key, build, empty) {
	const heads = [...tbody.parentElement.tHead.rows[0].cells].map((cell) => cell.textContent);
	if (items.length === 0) {
		sync(tbody, h("tr", { role: "row" }, h("td", { class: "empty", role: "cell", colspan: heads.length }, empty)));
		return;
	}
	const old = new Map([...tbody.rows].map((row) => [row.dataset.key, row]));
	let place = tbody.firstElementChild;
	for (const item of items) {
		const id = key(item);
		const row = old.get(id) || h("tr", { role: "row", "data-key": id });
		old.delete(id);
		sync(row, labelled(build(item), heads));
		if (row === place) place = place.nextElementSibling;
		else tbody.insertBefore(row, place);
	}
	for (const row of old.values()) row.remove();
}

/** Previous and next buttons under a table. `page` counts from 0; `more` says that the daemon has more than `total`. */
export function pager(node, { page, size, total, more, word, go }) {
	const last = Math.max(0, Math.ceil(total / size) - 1);
	const first = total === 0 ? 0 : page * size + 1;
	const label = `${first}–${Math.min(total, (page + 1) * size)} of ${total}${more ? "+" : ""} ${word}`;
	const sign = `${label}|${page}|${last}|${more}`;
	node.hidden = total <= size && !more;
	if (node.dataset.sign === sign) return;
	node.dataset.sign = sign;
	const act = node.contains(document.activeElement) && document.activeElement.dataset.act;
	fill(node, [
		h("button", { type: "button", "data-act": "prev", disabled: page === 0, click: () => go(page - 1) }, "Previous"),
		h("span", { class: "small" }, label),
		h("button", { type: "button", "data-act": "next", disabled: page >= last && !more, click: () => go(page + 1) }, "Next"),
	]);
	if (act) node.querySelector(`[data-act="${act}"]:not(:disabled)`)?.focus();
}

/** The address of a list with its filter: {text: "a", page: ""} → "#/jobs?text=a". */
export function address(view, filter) {
	const query = new URLSearchParams(Object.entries(filter).filter(([, value]) => value)).toString();
	return query ? `#/${view}?${query}` : `#/${view}`;
}

let remembering = 0;

/** Puts the filter of the list on show into the address bar, soon: a browser refuses to do so at every stroke of a key. */
export function remember(view, filter) {
	clearTimeout(remembering);
	remembering = setTimeout(() => {
		const shown = location.hash.split("?")[0] || "#/jobs";
		if (shown === `#/${view}`) history.replaceState(null, "", address(view, filter));
	}, REMEMBER_MS);
}

/** Asks before something is done; resolves to true or false. Escape means no. `more`: elements below the words. */
export function confirm(title, words, yes, more = []) {
	const dialog = $("confirm");
	text($("confirm-title"), title);
	text($("confirm-text"), words);
	text($("confirm-yes"), yes);
	$("confirm-yes").className = yes.startsWith("Yes") ? "danger" : "primary";
	fill($("confirm-more"), more);
	dialog.returnValue = "no";
	$("confirm-no").onclick = () => dialog.close("no");      // no submit button: Enter in a field means yes
	dialog.showModal();
	const first = $("confirm-more").querySelector("input, select, textarea");
	(yes.startsWith("Yes") || !first ? $("confirm-no") : first).focus();
	return new Promise((resolve) => {
		dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
	});
}

/** Shows words beside the pointer or the focused element, as long as it is there: for parts of drawings. */
export function tip(node, words) {
	const place = (x, y) => {
		const box = $("tip");
		fill(box, words().map((line) => h("div", {}, line)));
		box.hidden = false;
		const at = box.getBoundingClientRect();
		styled(box, { left: `${Math.max(4, Math.min(x + 14, innerWidth - at.width - 8))}px`,
			top: `${y + 18 + at.height > innerHeight ? Math.max(4, y - at.height - 10) : y + 18}px` });
	};
	const hide = () => { $("tip").hidden = true; };
	node.addEventListener("pointermove", (event) => place(event.clientX, event.clientY));
	node.addEventListener("pointerleave", hide);
	node.addEventListener("focus", () => {
		const at = node.getBoundingClientRect();
		place(at.left + at.width / 2, at.top + at.height / 2);
	});
	node.addEventListener("blur", hide);
	return node;
}
