// tensors.js: the tensors and values of one checkpoint. The first page makes the table; the rest comes behind it, and what is scrolled to
// comes first, for page tokens are positions.

import { checkpointPath, get } from "../api/api.js";

const PAGE = 1000;
const SIDE_BY_SIDE = 3;
const RETRY_MS = 1000;

/** A name with its numbers padded, so that layer 10 comes behind layer 9. */
const sortKey = (fqn) => fqn.replace(/\d+/g, (n) => n.padStart(9, "0"));

export class Tensors {
	constructor(ref, total, changed) {
		this.ref = ref;
		this.items = new Array(total);
		this.changed = changed;
		this.loaded = 0;
		this.done = false;
		this.failed = "";
		this.asked = new Set();          // pages that are here or on their way
		this.under = 0;
		this.next = 0;
		this.gone = false;
	}

	get total() {
		return this.items.length;
	}

	stop() {
		this.gone = true;
	}

	/** Asks for the page that has item i, before all others. */
	want(i) {
		const page = Math.floor(i / PAGE);
		if (i >= 0 && i < this.total && !this.asked.has(page) && this.under < SIDE_BY_SIDE + 1) this.read(page);
	}

	/** Reads on until all is here. */
	more() {
		while (!this.gone && this.under < SIDE_BY_SIDE && this.next * PAGE < this.total) {
			if (this.asked.has(this.next)) this.next++;
			else this.read(this.next++);
		}
	}

	async read(page) {
		this.asked.add(page);
		this.under++;
		try {
			let at = page * PAGE;
			const end = Math.min(this.total, at + PAGE);
			while (at < end && !this.gone) {     // a page of many chunks is cut short
				const body = await get(`${checkpointPath(this.ref, "/tensors")}?page_size=${end - at}&page_token=${at}`);
				const got = [...(body.tensors || []), ...(body.values || []).map((v) => ({ ...v, is_value: true }))];
				if (got.length === 0) throw new Error("a page is empty");
				got.forEach((item, k) => { this.items[at + k] = item; });
				at += got.length;
				this.loaded += got.length;
			}
			this.failed = "";
		} catch (error) {
			this.asked.delete(page);
			this.next = Math.min(this.next, page);
			this.failed = error.message;
			await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
		}
		this.under--;
		if (this.gone) return;
		if (!this.done && this.loaded >= this.total) this.finish();
		else if (!this.failed) this.more();
		this.changed();
	}

	/** All is here: in the order of names, numbers by their size; values come last. */
	finish() {
		this.done = true;
		const keyed = this.items.filter(Boolean).map((item) => [`${item.is_value ? 1 : 0}${sortKey(item.fqn)}`, item]);
		keyed.sort((a, b) => (a[0] < b[0] ? -1 : 1));
		this.items = keyed.map(([, item]) => item);
	}

	/** Positions of the items whose names have the text and begin with the prefix, of what is here. */
	find(text, prefix) {
		const low = text.toLowerCase(), out = [];
		this.items.forEach((item, i) => {
			if (item && item.fqn.startsWith(prefix) && (!low || item.fqn.toLowerCase().includes(low))) out.push(i);
		});
		return out;
	}

	/** The groups right below a prefix: [{name, prefix, count, bytes, groups}]; names are cut at dots. */
	groups(prefix) {
		const found = new Map();
		for (const item of this.items) {
			if (!item || !item.fqn.startsWith(prefix)) continue;
			const rest = item.fqn.slice(prefix.length), dot = rest.indexOf(".");
			if (dot <= 0) continue;
			const name = rest.slice(0, dot);
			const group = found.get(name) || { name, prefix: `${prefix}${name}.`, count: 0, bytes: 0, inner: false };
			group.count++;
			group.bytes += item.bytes || 0;
			group.inner ||= rest.indexOf(".", dot + 1) > 0;
			found.set(name, group);
		}
		return [...found.values()].sort((a, b) => (sortKey(a.name) < sortKey(b.name) ? -1 : 1));
	}
}
