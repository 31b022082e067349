// format.js: numbers, times and references as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(n) {
	if (!Number.isFinite(n)) return "–";
	let unit = 0;
	while (Math.abs(n) >= 1024 && unit < UNITS.length - 1) {
		n /= 1024;
		unit++;
	}
	return `${unit === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)} ${UNITS[unit]}`;
}

export function seconds(s) {
	if (!Number.isFinite(s)) return "–";
	if (s < 1) return `${Math.max(0, Math.round(s * 1000))} ms`;
	if (s < 60) return `${s < 10 && !Number.isInteger(s) ? s.toFixed(1) : Math.round(s)} s`;
	if (s < 3600) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
	if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
	return `${Math.floor(s / 86400)} d ${Math.round((s % 86400) / 3600)} h`;
}

export function ago(stamp) {
	const then = Date.parse(stamp);
	if (Number.isNaN(then)) return "–";
	const s = Math.max(0, (Date.now() - then) / 1000);
	return s < 2 ? "just now" : `${seconds(Math.round(s))} ago`;
}

/** The words for a thing that jobs read or write: "main:run1/step-100" or "shm:train". */
export function ref(r) {
	if (!r || typeof r !== "object") return "";
	if (typeof r.state_dict === "string") return `shm:${r.state_dict}`;
	if (typeof r.name === "string") return `${r.storage || "?"}:${r.name}`;
	return "";
}

/** What a job is about: "main:a → main:b". A job shows its request as `spec` or in its own members. */
export function what(job) {
	const spec = job.spec || job;
	const from = ref(spec.source) || ref(spec.a), to = ref(spec.target) || ref(spec.b);
	const arrow = spec.a ? " ↔ " : " → ";
	return from && to ? from + arrow + to : from || to;
}

/** Where an error is: "rank 2, model.w, __2_0.distcp at 4096", only what is known. */
export function place(error) {
	const parts = [];
	if (Number.isInteger(error.rank)) parts.push(`rank ${error.rank}`);
	if (error.fqn) parts.push(error.fqn);
	if (error.file) parts.push(Number.isInteger(error.offset) ? `${error.file} at offset ${error.offset}` : error.file);
	else if (Number.isInteger(error.offset)) parts.push(`offset ${error.offset}`);
	return parts.join(", ");
}

/** A figure of tensors, in six digits; integers as they are. "nan" and "inf" come as words. */
export function number(v) {
	if (v === undefined || v === null) return "–";
	if (typeof v !== "number" || Number.isInteger(v)) return String(v);
	return String(Number(v.toPrecision(6)));
}

export const shape = (dims) => `[${(dims || []).join(", ")}]`;

export function percent(done, total) {
	if (!(total > 0)) return null;
	return Math.min(100, Math.max(0, (100 * done) / total));
}
