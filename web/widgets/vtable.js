// vtable.js: a table of any length of which only the rows in sight exist. Rows are asked for by index; what is not there yet comes later.

import { h, fill, styled } from "./dom.js";

const ROW = 32;                      // px, as style.css has it
const SPARE = 8;                     // rows beyond the edges, so that a fast wheel shows no gap
const SPACE_MAX = 15e6;              // px: browsers cut off what is higher, so rows are spread over it instead

/**
 * options: label, heads (words), count(), row(i) → cells or null while it is unknown, current() → index of the chosen row or -1,
 * sight(first, last): told before rows are drawn.
 */
export class VirtualTable {
	constructor(options) {
		this.options = options;
		this.space = h("div", { role: "rowgroup", class: "virtual-space" });
		this.node = h("div", { class: "virtual", role: "table", "aria-label": options.label, tabindex: "0", scroll: () => this.later() },
			h("div", { role: "rowgroup", class: "virtual-top" }, h("div", { class: "virtual-head", role: "row", "aria-rowindex": "1" },
				options.heads.map((words) => h("span", { role: "columnheader" }, words)))),
			this.space);
		this.rows = new Map();
		this.frame = 0;
		new ResizeObserver(() => this.later()).observe(this.node);
	}

	later() {
		if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
	}

	/** Draws what is in sight; `anew`: rows that are there may have changed. */
	draw(anew = false) {
		cancelAnimationFrame(this.frame);
		this.frame = 0;
		const count = this.options.count(), high = Math.min(count * ROW, SPACE_MAX), spread = count * ROW > SPACE_MAX;
		if (this.high !== high) styled(this.space, { height: `${this.high = high}px`, position: "relative" });
		this.node.setAttribute("aria-rowcount", String(count + 1));
		const top = this.node.scrollTop, tall = this.node.clientHeight, inSight = Math.ceil(tall / ROW);
		const at = spread ? Math.round((top / Math.max(1, high - tall)) * Math.max(0, count - inSight + 2)) : Math.floor(top / ROW);
		const first = Math.max(0, at - SPARE), last = Math.min(count - 1, at + inSight + SPARE);
		this.options.sight?.(first, last);
		for (const [i, row] of this.rows) if (i < first || i > last || anew) {
			row.remove();
			this.rows.delete(i);
		}
		const current = this.options.current?.() ?? -1, fresh = document.createDocumentFragment();
		for (let i = first; i <= last; i++) {
			let row = this.rows.get(i);
			const y = spread ? top + (i - at) * ROW : i * ROW;
			if (!row || row.dataset.empty) {
				const cells = this.options.row(i);
				if (!row) {
					row = h("div", { class: "virtual-row", role: "row", "aria-rowindex": String(i + 2) });
					this.rows.set(i, row);
					fresh.append(row);
				}
				fill(row, cells ? cells.map((c, k) => h("span", { role: k ? "cell" : "rowheader" }, c))
					: h("span", { role: "cell", class: "quiet" }, "…"));
				if (cells) delete row.dataset.empty;
				else row.dataset.empty = "1";
			}
			row.classList.toggle("current", i === current);
			styled(row, { transform: `translateY(${y}px)` });
		}
		this.space.append(fresh);
	}

	show(index) {
		this.node.scrollTop = Math.max(0, index * ROW - this.node.clientHeight / 2);
		this.later();
	}
}
