// Searches the hub for models, and pulls one to the peers that will hold its layers or to chosen peers.
import { bytes, number } from "./format.js";
import { call, mesh } from "./mesh.js";
import { Place } from "./previews.js";
import { html, useRef, useState } from "./ui.js";
import { t } from "./strings.js";

const MOST = 20;

/**
 * pull(model, peers): downloads a model; with no peers, each peer gets its share of the plan that a request would make.
 * place(model, body): places a model.
 */
export function HubSearch({ may, pull, place, known }) {
  const field = useRef(null);
  const [found, setFound] = useState(null);
  const [note, setNote] = useState("");
  const [peer, setPeer] = useState("");
  const [placing, setPlacing] = useState("");
  const peers = Object.values(mesh.document?.peers ?? {}).sort((one, other) => one.name.localeCompare(other.name));
  const search = async (event) => {
    event.preventDefault();
    const query = field.current.value.trim();
    if (!query) return;
    setNote("");
    try {
      setFound((await call(`/models/search?${new URLSearchParams({ query, limit: MOST })}`)).data);
    } catch (error) {
      setFound(null);
      setNote(error.message);
    }
  };
  const fetchIt = (model) => { pull(model, peer ? [peer] : []); };
  return html`<section class="card"><h2>${t("hub.title")}</h2>
    <form class="row" onSubmit=${search}>
      <label>${t("hub.label")}<input ref=${field} placeholder="Qwen/Qwen3-0.6B" spellcheck="false" autocapitalize="off" /></label>
      <label class="where">${t("hub.where")}<select value=${peer} onChange=${(event) => setPeer(event.target.value)}><option value="">${t("hub.shares")}</option>
        ${peers.map((one) => html`<option key=${one.id} value=${one.id}>${t("hub.whole", { name: one.name })}</option>`)}</select></label>
      <button type="submit">${t("hub.search")}</button>
      <button type="button" class="primary" disabled=${!may} onClick=${() => field.current.value.trim() && fetchIt(field.current.value.trim())}>${t("models.pull")}</button>
    </form>
    <p class="note" role="alert">${note}</p>
    ${found?.length === 0 && html`<p class="quiet">${t("hub.none")}</p>`}
    ${(found ?? []).map((one) => html`<div class="item" key=${one.id}>
      <div><strong>${one.id}</strong><p class="quiet">${[one.num_bytes ? bytes(one.num_bytes) : "", t("hub.downloads", { n: number(one.downloads) }), one.is_gated ? t("hub.gated") : "", known.has(one.id) ? t("models.notLoaded") : ""].filter(Boolean).join(" · ")}</p></div>
      <div class="choices"><button type="button" disabled=${!may} aria-expanded=${placing === one.id ? "true" : "false"} onClick=${() => setPlacing(placing === one.id ? "" : one.id)}>${t("models.place")}<span class="hidden"> ${one.id}</span></button>
        <button type="button" disabled=${!may} onClick=${() => fetchIt(one.id)}>${t("models.pull")}<span class="hidden"> ${one.id}</span></button></div>
      ${placing === one.id && html`<${Place} key=${one.id} model=${one.id} layers=${0} act=${(body) => { setPlacing(""); place(one.id, body); }} close=${() => setPlacing("")} />`}</div>`)}
  </section>`;
}
