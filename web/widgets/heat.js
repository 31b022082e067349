// heat.js: a slice of a tensor as colours: blue below zero, red above; NaN and Inf stand out. Bytes come raw, as the file has them.

import { h, styled, tip } from "./dom.js";
import { number } from "./format.js";

const half = (bits) => {
	const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
	if (exponent === 0) return sign * fraction * 2 ** -24;
	if (exponent === 31) return fraction ? NaN : sign * Infinity;
	return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
};
const word = new DataView(new ArrayBuffer(4));
const brain = (bits) => {
	word.setUint16(0, bits);
	word.setUint16(2, 0);
	return word.getFloat32(0);
};
const READ = {
	float64: [8, (v, i) => v.getFloat64(i, true)], float32: [4, (v, i) => v.getFloat32(i, true)],
		float16: [2, (v, i) => half(v.getUint16(i, true))],
	bfloat16: [2, (v, i) => brain(v.getUint16(i, true))], int64: [8, (v, i) => Number(v.getBigInt64(i, true))],
		int32: [4, (v, i) => v.getInt32(i, true)],
	int16: [2, (v, i) => v.getInt16(i, true)], int8: [1, (v, i) => v.getInt8(i)], uint8: [1, (v, i) => v.getUint8(i)],
		bool: [1, (v, i) => v.getUint8(i)],
	uint16: [2, (v, i) => v.getUint16(i, true)], uint32: [4, (v, i) => v.getUint32(i, true)],
		uint64: [8, (v, i) => Number(v.getBigUint64(i, true))],
};

/** Numbers out of raw bytes, or null of a dtype that has no simple ones (complex, 8-bit floats, blocks). */
export function numbersOf(buffer, dtype) {
	const read = READ[dtype];
	if (!read) return null;
	const view = new DataView(buffer), out = [];
	for (let i = 0; i + read[0] <= buffer.byteLength; i += read[0]) out.push(read[1](view, i));
	return out;
}

function paint(v, most) {
	if (Number.isNaN(v)) return [255, 0, 200];
	if (!Number.isFinite(v)) return [255, 200, 0];
	const t = most ? Math.max(-1, Math.min(1, v / most)) : 0, s = Math.abs(t) ** 0.6, to = t < 0 ? [36, 99, 196] : [200, 48, 52];
	return [245, 246, 248].map((base, i) => Math.round(base + (to[i] - base) * s));
}

/** values in C order, rows × columns; at: where the slice begins in its last two dims. */
export function heat(values, rows, columns, at, label) {
	const most = values.reduce((m, v) => (Number.isFinite(v) ? Math.max(m, Math.abs(v)) : m), 0), low = Math.min(...values),
		high = Math.max(...values);
	const canvas = h("canvas", { class: "heat", width: columns, height: rows, role: "img", tabindex: "0",
		"aria-label": `${label}: ${rows} by ${columns} values from ${number(low)} to ${number(high)}` });
	const image = new ImageData(columns, rows);
	values.forEach((v, i) => image.data.set([...paint(v, most), 255], 4 * i));
	canvas.getContext("2d").putImageData(image, 0, 0);
	styled(canvas, { "aspect-ratio": `${columns} / ${Math.max(rows, columns / 8)}` });
	let last = "";
	canvas.addEventListener("pointermove", (event) => {
		const b = canvas.getBoundingClientRect(), c = Math.min(columns - 1, Math.floor(((event.clientX - b.left) / b.width) * columns));
		const r = Math.min(rows - 1, Math.floor(((event.clientY - b.top) / b.height) * rows));
		last = `[${[at[0] + r, at[1] + c].join(", ")}] = ${number(values[r * columns + c])}`;
	});
	return tip(canvas, () => [last || `from ${number(low)} to ${number(high)}`]);
}
