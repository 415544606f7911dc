// Formats numbers and times for people, in the language of the page.
import { language } from "./strings.js";

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function number(value, digits = 0) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return value.toLocaleString(language, { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

/** Formats bytes in decimal units, as the command line does: 1 GB is 10^9 bytes. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${number(value, value < 10 && unit > 0 ? 1 : 0)} ${UNITS[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${number(1000 * value)} ms` : `${number(value, value < 10 ? 2 : 1)} s`;
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${number(100 * share, share < 0.1 && share > 0 ? 1 : 0)} %`;
}

export function clock(unixSeconds) {
  return new Date(1000 * unixSeconds).toLocaleTimeString(language);
}
