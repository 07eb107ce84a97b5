// Numbers and times for people. Null means unknown, which is a dash.
const DASH = "–";
const digits = (value, places) => value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
const upTo = (value, places) => value.toLocaleString("en", { maximumFractionDigits: places });
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function ms(value) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  if (size < 9.95) return `${upTo(value, 1)} ms`;
  if (size < 999.5) return `${upTo(value, 0)} ms`;
  if (size < 9_995) return `${upTo(value / 1000, 2)} s`;
  if (size < 99_950) return `${upTo(value / 1000, 1)} s`;
  return size < 600_000 ? `${upTo(value / 1000, 0)} s` : `${upTo(value / 60_000, 1)} min`;
}

// A time that misses its limit does not look like the limit: 25.3 ms, not 25, if 25 ms were promised.
export function msAgainst(value, limit) {
  const text = ms(value);
  if (!known(value) || !known(limit) || value <= limit || text !== ms(limit)) return text;
  const [unit, name] = Math.abs(value) < 999.5 ? [1, "ms"] : [1000, "s"];
  const places = [1, 2, 3].find((count) => digits(value / unit, count) !== digits(limit / unit, count));
  return places === undefined ? `${text} and more` : `${digits(value / unit, places)} ${name}`;
}

export function count(value) {
  if (!known(value)) return DASH;
  if (Math.abs(value) < 100_000) return digits(value, 0);
  return Math.abs(value) < 1e6 ? `${digits(value / 1e3, 0)}k` : `${digits(value / 1e6, 1)}M`;
}

export const counted = (value, name) => `${count(value)} ${name}${value === 1 ? "" : "s"}`;
export const decimal = (value, places = 2) => (known(value) ? digits(value, places) : DASH);
export const percent = (share) => (known(share) ? `${digits(share * 100, share < 0.0995 && share > 0 ? 1 : 0)}%` : DASH);
export const rate = (value) => (known(value) ? (value < 99.5 ? digits(value, 1) : count(value)) : DASH);
export function bytes(value) {
  if (!known(value)) return DASH;
  const [unit, name] = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"]].find(([size]) => value >= size) ?? [1e3, "kB"];
  return `${digits(value / unit, value && value < 9.95 * unit ? 1 : 0)} ${name}`;
}
export const clock = (unixS) => (known(unixS) ? new Date(unixS * 1000).toLocaleTimeString("en-GB") : DASH);

// Of sorted values; null if there are none.
export const quantile = (sorted, share) => (sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null);

// The least round number that is not below `value`: two digits, so that what can be kept is still kept.
export function roundUp(value) {
  const unit = 10 ** (Math.floor(Math.log10(value)) - 1);
  return Number((Math.ceil(value / unit - 1e-9) * unit).toPrecision(2));
}

export { known };
