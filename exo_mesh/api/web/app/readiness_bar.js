// The bar above the message field: what the chosen model waits for, or a button to load it.
import { percent } from "./format.js";
import { call, mayAdmin } from "./mesh.js";
import { Bar } from "./parts.js";
import { html, useState } from "./ui.js";
import { t } from "./strings.js";

const PLACE_MS = 3600000; // a placement may wait for a download

/** readiness: the result of readinessOf. */
export function ReadinessBar({ model, readiness }) {
  const [asked, setAsked] = useState({ model: "", error: "" });
  const { state, text, share } = readiness;
  if (!model || state === "ready") return null;
  const load = () => {
    setAsked({ model, error: "" });
    call("/instance", { method: "POST", body: { model }, timeoutMs: PLACE_MS }).then(
      () => setAsked({ model: "", error: "" }), (error) => setAsked({ model: "", error: error.message }));
  };
  const isAsked = asked.model === model, canLoad = mayAdmin() && state !== "waiting";
  return html`<div class="readiness ${state}" role="status">${state === "waiting" && html`<span class="spinner" aria-hidden="true"></span>`}
    <span>${asked.error || (state === "absent" ? t("chat.loadsFirst", { model }) : text)}</span>
    ${canLoad && html`<button type="button" class="small" disabled=${isAsked} onClick=${load}>${isAsked ? t("models.working") : t("chat.load", { model })}</button>`}
    ${share !== null && html`<${Bar} share=${share} label=${percent(share)} />`}</div>`;
}
