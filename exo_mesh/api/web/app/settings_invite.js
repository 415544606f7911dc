// Invites a machine into a closed mesh with a code, as text and as a QR code. It is for one machine, for ten minutes.
import { call } from "./mesh.js";
import { CopyLine, QrCode } from "./settings_parts.js";
import { html, useEffect, useState } from "./ui.js";
import { t } from "./strings.js";

const POLL_MS = 2000;

export function Invite({ may }) {
  const [made, setMade] = useState(null);
  const [state, setState] = useState(null);
  const [note, setNote] = useState("");
  const isOpen = state?.state === "open";
  useEffect(() => {
    if (!isOpen) return undefined;
    const timer = setInterval(() => {
      if (!document.hidden) call("/v1/invite").then(setState, (error) => setNote(error.message));
    }, POLL_MS);
    return () => clearInterval(timer);
  }, [isOpen]);
  const act = async (method) => {
    setNote("");
    try {
      const found = await call("/v1/invite", { method, body: method === "POST" ? {} : undefined });
      setMade(method === "POST" ? found : null);
      setState(found);
    } catch (error) {
      setNote(error.message);
    }
  };
  return html`<section class="card"><h2>${t("invite.title")}</h2>
    <p class="quiet">${t("invite.note")}</p>
    <p class="note" role="alert">${note}</p>
    <div class="row">
      <button type="button" disabled=${!may} onClick=${() => act("POST")}>${t("invite.make")}</button>
      ${isOpen && html`<button type="button" disabled=${!may} onClick=${() => act("DELETE")}>${t("invite.withdraw")}</button>`}
    </div>
    <div role="status">${state && html`<p>${state.state === "open"
      ? t("invite.open", { n: Math.ceil(state.left_s / 60), tries: state.tries_left })
      : t(`invited.${state.state}`, { name: state.joined ?? "" })}</p>`}</div>
    ${isOpen && made && html`<div class="invitation">
      ${made.qr?.length > 0 && html`<${QrCode} rows=${made.qr} label=${t("invite.qr")} />`}
      <div><p class="quiet">${t("invite.type")}</p><${CopyLine} text=${made.command ?? made.codes[0]} />
        ${made.codes.length > 1 && html`<p class="quiet">${t("invite.others")}</p>${made.codes.slice(1).map((code) => html`<${CopyLine} key=${code} text=${code} />`)}`}</div>
    </div>`}
  </section>`;
}
