// The tip for a peer that is pointed at or focused: its health and the remedies.
import { bytes, percent } from "./format.js";
import { figuresOf, levelOf, usedOf } from "./ring.js";
import { html } from "./ui.js";
import { t } from "./strings.js";

/** place: the place of the peer, as shares of the picture's width and height. */
export function RingTip({ live, id, place }) {
  if (!id || !place) return null;
  const peer = live.peers[id], health = live.health?.peer_health?.find((one) => one.id === id);
  const reasons = health?.reasons ?? [];
  const side = place.x < 0.4 ? "left" : place.x > 0.6 ? "right" : "middle";
  return html`<div class="tip tip-${side} ${place.y > 0.5 ? "tip-above" : ""}" role="status" style=${{ left: `${100 * place.x}%`, top: `${100 * place.y}%` }}>
    <strong>${peer?.name ?? health?.name ?? id}</strong> <span class="quiet">${t(`level.${levelOf(live.health, id)}`)}</span>
    ${peer && html`<p>${peer.total_bytes ? `${t("mesh.memoryUsed", { share: percent(usedOf(peer)) })}, ${t("ring.free", { bytes: bytes(peer.usable_bytes) })}` : t("mesh.memoryUnknown")}</p><p>${figuresOf(peer)}</p>`}
    ${reasons.map((reason) => html`<p class="level-${reason.level}"><b>${reason.message}</b> ${reason.remedy}</p>`)}
  </div>`;
}
