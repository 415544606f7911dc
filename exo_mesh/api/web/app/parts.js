// Small components that several views use.
import { bytes, percent } from "./format.js";
import { html, useEffect, useRef, useState } from "./ui.js";
import { t } from "./strings.js";

/** share: 0 to 1. */
export function Bar({ share, label, level = "ok" }) {
  const value = Math.max(0, Math.min(1, share || 0));
  return html`<svg class="meter level-${level}" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label=${label}>
    <rect class="track" width="100" height="6" /><rect class="fill" width=${100 * value} height="6" /></svg>`;
}

/** The memory of a peer: used by models, otherwise used, and free. */
export function MemoryBar({ peer }) {
  if (!peer.total_bytes) return html`<${Bar} share=${0} label=${t("mesh.memoryUnknown")} />`;
  const total = peer.total_bytes, used = Math.max(0, Math.min(1, 1 - peer.usable_bytes / total));
  const models = Math.min(used, peer.reserved_bytes / total);
  const label = `${t("mesh.memoryUsed", { share: percent(used) })}, ${t("mesh.memoryModels", { bytes: bytes(peer.reserved_bytes) })}`;
  return html`<svg class="meter memory level-${used > 0.9 ? "failed" : used > 0.75 ? "degraded" : "ok"}" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label=${label}>
    <rect class="track" width="100" height="6" /><rect class="other" width=${100 * used} height="6" /><rect class="fill" width=${100 * models} height="6" /></svg>`;
}

/** A button that asks for confirmation in its own place, so that no dialog covers the page. */
export function Sure({ label, question, act, disabled = false, asked = false, no: leave = () => {} }) {
  const [asks, set] = useState(asked);
  const setAsks = (value) => { set(value); if (!value) leave(); };
  const no = useRef(null);
  useEffect(() => { if (asks) no.current?.focus(); }, [asks]);
  if (!asks) return html`<button type="button" class="danger" disabled=${disabled} onClick=${() => setAsks(true)}>${label}</button>`;
  return html`<span class="sure" role="group" aria-label=${question} onKeyDown=${(event) => { if (event.key === "Escape") { event.preventDefault(); setAsks(false); } }}><span>${question}</span>
    <button type="button" class="danger" onClick=${() => { setAsks(false); act(); }}>${label}</button>
    <button type="button" ref=${no} onClick=${() => setAsks(false)}>${t("sure.no")}</button></span>`;
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
