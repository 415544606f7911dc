// Get a model: those of the cards that fit this mesh, a search of the hub, and what is being fetched.
import { reachesHub, useCards } from "./cards.js";
import { fitOf, fitText, sizeText, suggested } from "./fitting.js";
import { number } from "./format.js";
import { call, mesh } from "./mesh.js";
import { Place } from "./previews.js";
import { html, useRef, useState } from "./ui.js";
import { t } from "./strings.js";

const MOST = 20;

/**
 * pull(model, peers): downloads a model; with no peers, each peer gets its share of the plan that a request would make.
 * place(model, body): places a model. busy: what is being done to which model. known: the models of the mesh, by id.
 */
export function GetModel({ may, pull, place, busy, known }) {
  const field = useRef(null);
  const [found, setFound] = useState(null);
  const [state, setState] = useState({ isSearching: false, note: "" });
  const [peer, setPeer] = useState("");
  const peers = mesh.document?.peers ?? {}, cards = useCards();
  const names = Object.values(peers).sort((one, other) => one.name.localeCompare(other.name));
  const typed = () => field.current.value.trim();
  const search = async (event) => {
    event.preventDefault();
    if (!typed()) return;
    setState({ isSearching: true, note: "" });
    try {
      setFound((await call(`/models/search?${new URLSearchParams({ query: typed(), limit: MOST })}`)).data);
      setState({ isSearching: false, note: "" });
    } catch (error) {
      setFound(null);
      setState({ isSearching: false, note: error.message });
    }
  };
  const fetchIt = (model) => pull(model, peer ? [peer] : []);
  const rows = { may, busy, known, peers, fetchIt, place };
  if (!mesh.document) return null;
  if (!reachesHub(peers)) return html`<section class="card get-model"><h2>${t("hub.title")}</h2><p class="quiet">${t("hub.offline")}</p></section>`;
  const offers = found === null ? suggested((cards ?? []).filter((one) => !known.has(one.id)), peers) : found.map((model) => ({ model, fit: fitOf(model, peers) }));
  return html`<section class="card get-model"><h2>${t("hub.title")}</h2>
    <form class="row" onSubmit=${search}>
      <label>${t("hub.label")}<input ref=${field} placeholder="Qwen/Qwen3-0.6B" spellcheck="false" autocapitalize="off" onInput=${(event) => event.target.value || setFound(null)} /></label>
      <label class="where">${t("hub.where")}<select value=${peer} onChange=${(event) => setPeer(event.target.value)}><option value="">${t("hub.shares")}</option>
        ${names.map((one) => html`<option key=${one.id} value=${one.id}>${t("hub.whole", { name: one.name })}</option>`)}</select></label>
      <button type="submit" disabled=${state.isSearching}>${t(state.isSearching ? "hub.searching" : "hub.search")}</button>
      ${may && html`<button type="button" class="primary" onClick=${() => typed() && !busy[typed()] && fetchIt(typed())}>${t("models.pull")}</button>`}
    </form>
    <${Looking} busy=${busy} />
    <p class="note" role="alert">${state.note}</p>
    ${found === null && offers.length > 0 && html`<h3>${t("hub.suggested")}</h3>`}
    ${found === null && cards && !offers.length && html`<p class="quiet">${t("hub.nothingFits")}</p>`}
    ${found?.length === 0 && html`<p class="quiet">${t("hub.none")}</p>`}
    ${offers.map(({ model, fit }) => html`<${Offer} key=${model.id} model=${model} fit=${fit} ...${rows} />`)}
  </section>`;
}

/** What was asked of the hub and has not begun to arrive. */
function Looking({ busy }) {
  const begun = new Set(Object.values(mesh.document?.downloads ?? {}).map((one) => one.model));
  const names = Object.entries(busy).filter(([name, what]) => what === "pull" && !begun.has(name)).map(([name]) => name);
  return html`<div role="status">${names.map((name) => html`<p class="looking" key=${name}><span class="spinner" aria-hidden="true"></span>${t("hub.looking", { name })}</p>`)}</div>`;
}

/** A model of the cards or of the hub. Only what can work is offered. */
function Offer({ model, fit, may, busy, known, fetchIt, place }) {
  const [isPlacing, setPlacing] = useState(false);
  const isHere = known.has(model.id), isBusy = Boolean(busy[model.id]), fits = fit?.kind !== "no";
  const facts = [sizeText(model), fitText(fit), model.downloads !== undefined && t("hub.downloads", { n: number(model.downloads) }), model.is_gated && t("hub.gated"), isHere && t("models.notLoaded")];
  return html`<div class="item offer">
    <div><strong>${model.id}</strong><p class="quiet">${facts.filter(Boolean).join(" · ")}</p></div>
    ${may && fits && !isHere && html`<div class="choices">
      <button type="button" class="quiet-button" disabled=${isBusy} aria-expanded=${isPlacing ? "true" : "false"} onClick=${() => setPlacing(!isPlacing)}>${t("models.place")}<span class="hidden"> ${model.id}</span></button>
      <button type="button" disabled=${isBusy} onClick=${() => fetchIt(model.id)}>${t(isBusy ? "models.working" : "models.pull")}<span class="hidden"> ${model.id}</span></button></div>`}
    ${isPlacing && html`<${Place} model=${model.id} layers=${model.num_layers ?? 0} act=${(body) => { setPlacing(false); place(model.id, body); }} close=${() => setPlacing(false)} />`}</div>`;
}
