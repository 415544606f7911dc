// A ring that shows how much of the context is used, and says what happens when it is full.
import { number, percent } from "./format.js";
import { html, useEffect, useRef, useState } from "./ui.js";
import { t } from "./strings.js";

const LENGTH = 2 * Math.PI * 9; // of the ring's circle

/** used: {tokens, isExact}; limit: in tokens, 0 if unknown. */
export function ContextRing({ used, limit }) {
  const [isOpen, open] = useState(false);
  const place = useRef(null);
  useEffect(() => {
    if (!isOpen) return undefined;
    const outside = (event) => !place.current?.contains(event.target) && open(false);
    addEventListener("pointerdown", outside);
    return () => removeEventListener("pointerdown", outside);
  }, [isOpen]);
  if (!limit) return null;
  const share = Math.min(1, used.tokens / limit);
  const level = share > 0.95 ? "failed" : share > 0.8 ? "degraded" : "ok";
  const label = t(used.isExact ? "context.used" : "context.about", { tokens: number(used.tokens), limit: number(limit), share: percent(share) });
  const pressed = (event) => { if (event.key === "Escape" && isOpen) { event.preventDefault(); open(false); } };
  return html`<div class="context level-${level}" ref=${place} onKeyDown=${pressed}>
    <button type="button" class="icon-button" aria-label=${label} title=${label} aria-expanded=${isOpen} onClick=${() => open(!isOpen)}>
      <svg viewBox="0 0 24 24" aria-hidden="true"><circle class="track" cx="12" cy="12" r="9" /><circle class="fill" cx="12" cy="12" r="9" stroke-dasharray="${(LENGTH * share).toFixed(2)} ${LENGTH.toFixed(2)}" /></svg></button>
    ${isOpen && html`<div class="tip-box" role="status"><strong>${label}</strong><p>${t("context.full")}</p></div>`}</div>`;
}
