// Lists the running answers that this caller may see, also those of other tabs and clients, with a button to stop each.
import { clock, number } from "./format.js";
import { call, mesh } from "./mesh.js";
import { Sure } from "./parts.js";
import { html, useEffect, useState } from "./ui.js";
import { t } from "./strings.js";

/** Fetches the list again with each live document while any answer runs, and not at all otherwise. */
export function Answers() {
  const [list, setList] = useState([]);
  const [note, setNote] = useState("");
  const live = mesh.document;
  const busy = Object.values(mesh.rates).some((rate) => rate.tokens > 0) || (live?.queue?.entered ?? 0) > 0 || list.length > 0;
  const time = busy ? live?.time ?? 0 : 0;
  const read = () => call("/v1/streams").then(({ data }) => setList(data), (error) => setNote(error.message));
  useEffect(() => { read(); }, [time, mesh.base]);
  const stop = (id) => {
    setNote("");
    call(`/v1/streams/${encodeURIComponent(id)}`, { method: "DELETE" }).then(read, (error) => { setNote(error.message); read(); });
  };
  if (!list.length) return note ? html`<p class="note" role="alert">${note}</p>` : null;
  return html`<section class="card answers"><h2>${t("answers.title", { n: list.length })}</h2><p class="note" role="alert">${note}</p>
    ${list.map((one) => html`<div class="item" key=${one.id}>
      <div><strong>${one.model}</strong> <span class="pill">${t(`answers.${one.state}`)}</span>
        <p class="quiet">${[clock(one.created), live?.peers?.[one.peer]?.name ?? one.peer.slice(0, 8), t("chat.tokens", { n: number(one.output_tokens) }), one.key_id && t("answers.key", { id: one.key_id })].filter(Boolean).join(" · ")}</p></div>
      <${Sure} label=${t("chat.stop")} question=${t("answers.sure")} act=${() => stop(one.id)} /></div>`)}
  </section>`;
}
