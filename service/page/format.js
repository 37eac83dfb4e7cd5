// Numbers as people read them.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const NONE = "–";

/** 12,345; 3.4 below ten. */
export function count(value) {
  if (value === null || !Number.isFinite(value)) return NONE;
  return value > 0 && value < 9.95 && !Number.isInteger(value) ? value.toFixed(1) : WHOLE.format(value);
}

/** 1.23M */
export function short(value) {
  return value < 100_000 ? count(value) : COMPACT.format(value);
}

/** 1 text; 2 texts; 1.23M texts. */
export function amount(value, noun) {
  return `${short(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** 12.3%; never 0% or 100% of something that is between. */
export function percent(part, whole) {
  if (!(whole > 0)) return NONE;
  const value = (100 * part) / whole;
  if (value > 0 && value < 0.1) return "<0.1%";
  if (value < 100 && value > 99.9) return ">99.9%";
  return `${value === 0 || value === 100 ? value : value.toFixed(1)}%`;
}

/** [value, unit] of a time in seconds, with three digits. */
export function seconds(value) {
  if (value === null) return [NONE, "ms"];
  const [scaled, unit] = value < 1 ? [value * 1000, "ms"] : [value, "s"];
  return [scaled.toFixed(scaled < 10 ? 2 : scaled < 100 ? 1 : 0), unit];
}

/** A time in seconds with as few digits as it has: 0.5 ms. */
export function duration(value) {
  return value < 1 ? `${digits(value * 1000)} ms` : `${digits(value)} s`;
}

/** 1.5 GiB */
export function bytes(value) {
  let unit = 0;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

/** A number with three significant digits, such as 0.0123. */
export function digits(value) {
  return value === 0 ? "0" : Number(value.toPrecision(3)).toString();
}
