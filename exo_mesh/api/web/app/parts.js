// Small parts that several views share.
import { html } from "./ui.js";

/** share: 0 to 1. */
export function Bar({ share, label, level = "ok" }) {
  const value = Math.max(0, Math.min(1, share || 0));
  return html`<svg class="meter level-${level}" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label=${label}>
    <rect class="track" width="100" height="6" /><rect class="fill" width=${100 * value} height="6" /></svg>`;
}

export function Tile({ label, value, level = "" }) {
  return html`<div class="tile ${level ? `level-${level}` : ""}"><dt>${label}</dt><dd>${value}</dd></div>`;
}

/** points: [time, value] by time; most: the value at the top. */
export function Curve({ points, most, label }) {
  if (points.length < 2) return html`<svg class="curve" viewBox="0 0 300 60" role="img" aria-label=${label}></svg>`;
  const first = points[0][0], span = points.at(-1)[0] - first || 1;
  const line = points.map(([time, value]) => `${((300 * (time - first)) / span).toFixed(1)} ${(58 - (56 * value) / most).toFixed(1)}`).join(" L");
  return html`<svg class="curve" viewBox="0 0 300 60" preserveAspectRatio="none" role="img" aria-label=${label}>
    <path class="area" d="M0 60 L${line} L300 60z" /><path class="line" d="M${line}" /></svg>`;
}
