// The models view: get a model, downloads, loaded models, those on disk and those of model servers.
import { Answers } from "./answers.js";
import { bytes, number, percent, seconds } from "./format.js";
import { fitOf, fitText } from "./fitting.js";
import { GetModel } from "./get_model.js";
import { call, mayAdmin, mesh } from "./mesh.js";
import { inPath, reloadModels, useModels } from "./models.js";
import { Bar, Sure } from "./parts.js";
import { Place } from "./previews.js";
import { readinessOf } from "./readiness.js";
import { isOnlyServed, isServed } from "./served.js";
import { html, useState } from "./ui.js";
import { t } from "./strings.js";
import { rangeText, stageClass } from "./who_computed.js";

const PLACE_MS = 3600000; // a placement may wait for a download
const ACTIVE = new Set(["ongoing", "pending"]);

export function ModelsView() {
  const { list, error } = useModels();
  const [busy, setBusy] = useState({});
  const [note, setNote] = useState("");
  const live = mesh.document;
  /** Makes one change at a time for each name, and shows the node's error message. what: pull, place or another one. */
  const act = async (name, path, { what = "other", ...options }) => {
    setBusy((now) => ({ ...now, [name]: what }));
    setNote("");
    try {
      await call(path, options);
    } catch (failure) {
      setNote(`${name}: ${failure.message}`);
    }
    setBusy(({ [name]: done, ...others }) => others);
    reloadModels();
  };
  const may = mayAdmin(), peers = live?.peers ?? {};
  const pull = (model, where) => act(model, "/download/start", { what: "pull", method: "POST", body: where.length ? { model, peers: where, whole: true } : { model } });
  const place = (model, body) => act(model, "/instance", { what: "place", method: "POST", body, timeoutMs: PLACE_MS });
  return html`<div class="page">
    <div class="head"><h1>${t("nav.models")}</h1></div>
    ${!may && mesh.hello && html`<p class="quiet">${t("models.readOnly")}</p>`}
    <p class="note" role="alert">${note || error?.message || ""}</p>
    <${GetModel} may=${may} pull=${pull} place=${place} busy=${busy} known=${new Set(list.map((one) => one.id))} />
    <${Downloads} downloads=${Object.values(live?.downloads ?? {})} peers=${peers} may=${may} act=${act} />
    <${Loaded} instances=${Object.values(live?.instances ?? {})} live=${live} may=${may} busy=${busy} act=${act} />
    <${OnDisk} list=${list.filter((one) => !isOnlyServed(one))} live=${live} may=${may} busy=${busy} act=${act} place=${place} />
    <${Served} list=${list.filter(isOnlyServed)} live=${live} />
    <${Answers} />
  </div>`;
}

/** Groups downloads by model, because several peers download their shares at the same time. */
function Downloads({ downloads, peers, may, act }) {
  if (!downloads.length) return null;
  const models = [...new Set(downloads.map((one) => one.model))].sort();
  return html`<section class="card"><h2>${t("models.downloads")}</h2>${models.map((model) => {
    const mine = downloads.filter((one) => one.model === model);
    return html`<div class="download" key=${model}><strong>${model}</strong>${mine.map((one) => html`
      <${Download} key=${one.peer} one=${one} name=${peers[one.peer]?.name ?? one.peer.slice(0, 8)} may=${may} act=${act} />`)}</div>`;
  })}</section>`;
}

function Download({ one, name, may, act }) {
  const share = one.total_bytes ? one.done_bytes / one.total_bytes : one.state === "completed" ? 1 : 0;
  const figures = [t("models.progress", { share: percent(share), done: bytes(one.done_bytes), total: bytes(one.total_bytes) }),
    one.bytes_per_s ? `${bytes(one.bytes_per_s)}/s` : "", one.eta_s ? seconds(one.eta_s) : "", one.reason ?? ""].filter(Boolean);
  return html`<div class="of-peer"><div class="row"><span>${name}</span><span class="pill state-${one.state}">${t(`download.${one.state}`)}</span>
      ${may && one.state !== "completed" && html`<button type="button" class="small" onClick=${() => act(one.model, `/download/${one.peer}/${inPath(one.model)}`, { method: "DELETE" })}>${t("models.cancel")}<span class="hidden"> ${one.model} ${name}</span></button>`}</div>
    <${Bar} share=${share} level=${one.state === "failed" ? "failed" : "ok"} label=${`${name} ${percent(share)}`} />
    <p class="quiet">${figures.join(" · ")}</p></div>`;
}

function Loaded({ instances, live, may, busy, act }) {
  return html`<section class="card"><h2>${t("models.loaded")}</h2>
    ${!instances.length && html`<p class="quiet">${t("models.noneLoaded")}</p>`}
    ${instances.map((one) => html`<div class="item" key=${one.id}>
      <div><strong>${one.model}</strong> <span class="pill state-${one.state}">${t(`instance.${one.state}`)}</span>
        <p class="quiet">${[t("models.context", { n: number(one.context_limit) }), one.policy && !isServed(live, one) && t(`policy.${one.policy}`), one.id, one.reason].filter(Boolean).join(" · ")}</p>
        ${isServed(live, one) ? html`<${Server} instance=${one} live=${live} />` : html`<ol class="stages">${one.stages.map((stage, index) => html`<li key=${index}><${Stage} stage=${stage} index=${index} peers=${live.peers} /></li>`)}</ol>`}
        ${one.state !== "ready" && html`<${Waits} model=${one.model} live=${live} />`}</div>
      <div class="choices">${one.state === "ready" && html`<a class="button" href="#/chat">${t("nav.chat")}<span class="hidden"> ${one.model}</span></a>`}
        ${may && html`<button type="button" class="quiet-button" disabled=${busy[one.id]} onClick=${() => act(one.id, `/instance/${encodeURIComponent(one.id)}`, { method: "DELETE" })}>${t("models.unload")}<span class="hidden"> ${one.model}</span></button>`}</div>
    </div>`)}</section>`;
}

function Stage({ stage, index, peers }) {
  const name = (id) => peers?.[id]?.name ?? (id ?? "").slice(0, 8);
  const who = stage.group ? stage.group.peers.map(name).join(" + ") : name(stage.peer);
  return html`<i class="swatch ${stageClass(index)}" aria-hidden="true"></i> ${who} <span class="quiet">${t("ring.layers", { layers: rangeText(stage.layers) })} · ${stage.engine} · ${bytes(stage.reserve_bytes)}</span>`;
}

/** The peer that passes the text of requests on to a model server. */
function Server({ instance, live }) {
  const [stage] = instance.stages, server = live.peers[stage.peer]?.served?.find((one) => one.name === instance.model)?.server;
  return html`<p class="quiet">${t("models.passedOn", { name: live.peers[stage.peer]?.name ?? stage.peer.slice(0, 8), engine: stage.engine, server: server ?? "?" })}</p>`;
}

/** Models of model servers: nothing of them is in the mesh, so there is nothing to place, load or delete. */
function Served({ list, live }) {
  if (!list.length) return null;
  return html`<section class="card"><h2>${t("models.served")}</h2>${list.map((one) => html`<div class="item" key=${one.id}>
    <div><strong>${one.id}</strong>${one.served_by.map((by) => html`<p class="quiet" key=${by.server}>${t("models.servedBy", { engine: by.engine, server: by.server })}</p>`)}
      ${one.context_length > 1 && html`<p class="quiet">${t("models.context", { n: number(one.context_length) })}</p>`}
      <p class="quiet">${t("models.through", { peers: one.peers.map((id) => live?.peers?.[id]?.name ?? id.slice(0, 8)).join(", ") })}</p></div>
    <div class="choices"><a class="button" href="#/chat">${t("nav.chat")}<span class="hidden"> ${one.id}</span></a></div></div>`)}</section>`;
}

function Waits({ model, live }) {
  const { text, share } = readinessOf(model, live);
  return text && html`<p class="waits">${text}</p>${share !== null && html`<${Bar} share=${share} label=${percent(share)} />`}`;
}

function OnDisk({ list, live, ...acts }) {
  return html`<section class="card"><h2>${t("models.onDisk")}</h2>
    ${!list.length && html`<p class="quiet">${t("models.none")}</p>`}
    ${list.map((one) => html`<${OneOnDisk} key=${one.id} one=${one} live=${live} ...${acts} />`)}</section>`;
}

/** A model on the disks of peers. Only what can work is offered: nothing while its files arrive, and loading only what fits.
 * Loading a part fetches the rest. */
function OneOnDisk({ one, live, may, busy, act, place }) {
  const [isPlacing, setPlacing] = useState(false);
  const peers = live?.peers ?? {}, doing = busy[one.id], isLoaded = one.status === "loaded", isPart = one.status === "partial";
  const isFetched = Object.values(live?.downloads ?? {}).some((download) => download.model === one.id && ACTIVE.has(download.state));
  const fit = fitOf(one, peers), fits = fit?.kind !== "no", hidden = html`<span class="hidden"> ${one.id}</span>`;
  const facts = [bytes(one.num_bytes), one.num_layers > 0 && t("models.layers", { n: one.num_layers }), one.quantization || one.dtype, t("models.context", { n: number(one.context_length) }), !isLoaded && fitText(fit)];
  return html`<div class="item model">
    <div><strong>${one.id}</strong> ${isLoaded && html`<span class="pill state-loaded">${t("models.isLoaded")}</span>`}${isPart && html`<span class="pill">${t("models.isPart")}</span>`}
      <p class="quiet">${facts.filter(Boolean).join(" · ")}</p>
      ${(one.served_by ?? []).map((by) => html`<p class="quiet" key=${by.server}>${t("models.servedBy", { engine: by.engine, server: by.server })}</p>`)}
      <p class="quiet">${t("models.on", { peers: wherePlaced(one.id, peers) || one.peers.map((id) => peers[id]?.name ?? id.slice(0, 8)).join(", ") })}</p>
      ${doing && html`<p class="looking" role="status"><span class="spinner" aria-hidden="true"></span>${doing === "place" ? readinessOf(one.id, live).text || t("models.placing") : t("models.working")}</p>`}</div>
    ${may && !isFetched && html`<div class="choices">
      ${fits && html`<button type="button" class="quiet-button" disabled=${doing} aria-expanded=${isPlacing ? "true" : "false"} onClick=${() => setPlacing(!isPlacing)}>${t("models.place")}${hidden}</button>`}
      ${fits && !isLoaded && html`<button type="button" disabled=${doing} onClick=${() => place(one.id, { model: one.id })}>${t("models.load")}${hidden}</button>`}
      ${!isLoaded && html`<${Sure} label=${t("models.delete")} question=${t("models.sure", { name: one.id })} disabled=${doing} act=${() => act(one.id, `/v1/models/${inPath(one.id)}`, { method: "DELETE" })} />`}
    </div>`}
    ${isFetched && html`<p class="quiet">${t("models.arriving")}</p>`}
    ${isPlacing && html`<${Place} model=${one.id} layers=${one.num_layers} act=${(body) => { setPlacing(false); place(one.id, body); }} close=${() => setPlacing(false)} />`}
  </div>`;
}

/** The names of the peers that have the model, or parts of it. */
function wherePlaced(model, peers) {
  const all = Object.values(peers).sort((one, other) => one.name.localeCompare(other.name));
  return all.filter((peer) => (peer.models ?? []).includes(model) || (peer.partial_models ?? []).includes(model))
    .map((peer) => ((peer.models ?? []).includes(model) ? peer.name : t("models.part", { name: peer.name }))).join(", ");
}
