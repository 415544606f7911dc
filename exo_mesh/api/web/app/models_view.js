// The models view: loaded models, models on disk and downloads; place, unload, search, download and delete.
import { Answers } from "./answers.js";
import { bytes, number, percent, seconds } from "./format.js";
import { HubSearch } from "./hub_search.js";
import { call, mayAdmin, mesh } from "./mesh.js";
import { inPath, reloadModels, useModels } from "./models.js";
import { Bar, Sure } from "./parts.js";
import { Place } from "./previews.js";
import { readinessOf } from "./readiness.js";
import { html, useState } from "./ui.js";
import { t } from "./strings.js";

const PLACE_MS = 3600000; // a placement may wait for a download

export function ModelsView() {
  const { list, error } = useModels();
  const [busy, setBusy] = useState({});
  const [note, setNote] = useState("");
  const live = mesh.document;
  /** Makes one change at a time for each name, and shows the node's error message. */
  const act = async (name, path, options) => {
    setBusy((now) => ({ ...now, [name]: true }));
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
  const pull = (model, where) => act(model, "/download/start", { method: "POST", body: where.length ? { model, peers: where, whole: true } : { model } });
  const place = (model, body) => act(model, "/instance", { method: "POST", body, timeoutMs: PLACE_MS });
  return html`<div class="page">
    <div class="head"><h1>${t("nav.models")}</h1></div>
    ${!may && mesh.hello && html`<p class="quiet">${t("models.readOnly")}</p>`}
    <p class="note" role="alert">${note || error?.message || ""}</p>
    <${Loaded} instances=${Object.values(live?.instances ?? {})} live=${live} may=${may} busy=${busy} act=${act} />
    <${Answers} />
    <${Downloads} downloads=${Object.values(live?.downloads ?? {})} peers=${peers} may=${may} act=${act} />
    <${OnDisk} list=${list} live=${live} may=${may} busy=${busy} act=${act} place=${place} />
    <${HubSearch} may=${may} pull=${pull} place=${place} known=${new Set(list.map((one) => one.id))} />
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
      ${one.state !== "completed" && html`<button type="button" class="small" disabled=${!may} onClick=${() => act(one.model, `/download/${one.peer}/${inPath(one.model)}`, { method: "DELETE" })}>${t("models.cancel")}<span class="hidden"> ${one.model} ${name}</span></button>`}</div>
    <${Bar} share=${share} level=${one.state === "failed" ? "failed" : "ok"} label=${`${name} ${percent(share)}`} />
    <p class="quiet">${figures.join(" · ")}</p></div>`;
}

function Loaded({ instances, live, may, busy, act }) {
  return html`<section class="card"><h2>${t("models.loaded")}</h2>
    ${!instances.length && html`<p class="quiet">${t("models.noneLoaded")}</p>`}
    ${instances.map((one) => html`<div class="item" key=${one.id}>
      <div><strong>${one.model}</strong> <span class="pill state-${one.state}">${t(`instance.${one.state}`)}</span>
        <p class="quiet">${t("models.context", { n: number(one.context_limit) })} · ${one.policy ? t(`policy.${one.policy}`) : ""} · ${one.id}${one.reason ? ` · ${one.reason}` : ""}</p>
        <ol class="stages">${one.stages.map((stage, index) => html`<li key=${index}><${Stage} stage=${stage} peers=${live.peers} /></li>`)}</ol>
        ${one.state !== "ready" && html`<${Waits} model=${one.model} live=${live} />`}</div>
      <div class="choices">${one.state === "ready" && html`<a class="button" href="#/chat">${t("nav.chat")}</a>`}
        <button type="button" disabled=${!may || busy[one.id]} onClick=${() => act(one.id, `/instance/${encodeURIComponent(one.id)}`, { method: "DELETE" })}>${t("models.unload")}</button></div>
    </div>`)}</section>`;
}

function Stage({ stage, peers }) {
  const name = (id) => peers?.[id]?.name ?? (id ?? "").slice(0, 8);
  const who = stage.group ? stage.group.peers.map(name).join(" + ") : name(stage.peer);
  return html`${who} <span class="quiet">${t("ring.layers", { layers: `${stage.layers[0]}–${stage.layers[1] - 1}` })} · ${stage.engine} · ${bytes(stage.reserve_bytes)}</span>`;
}

function Waits({ model, live }) {
  const { text, share } = readinessOf(model, live);
  return text && html`<p class="waits">${text}</p>${share !== null && html`<${Bar} share=${share} label=${percent(share)} />`}`;
}

function OnDisk({ list, live, may, busy, act, place }) {
  const [placing, setPlacing] = useState("");
  const placeIt = (name) => (body) => { setPlacing(""); place(name, body); };
  const peers = live?.peers ?? {};
  const remove = (one) => act(one.id, `/v1/models/${inPath(one.id)}`, { method: "DELETE" });
  return html`<section class="card"><h2>${t("models.onDisk")}</h2>
    ${!list.length && html`<p class="quiet">${t("models.none")}</p>`}
    ${list.map((one) => html`<div class="item model" key=${one.id}>
      <div><strong>${one.id}</strong> ${one.status === "loaded" && html`<span class="pill state-loaded">${t("models.isLoaded")}</span>`}
        <p class="quiet">${[bytes(one.num_bytes), t("models.layers", { n: one.num_layers }), one.quantization || one.dtype, t("models.context", { n: number(one.context_length) })].filter(Boolean).join(" · ")}</p>
        ${(one.served_by ?? []).map((by) => html`<p class="quiet" key=${by.server}>${t("models.servedBy", { engine: by.engine, server: by.server })}</p>`)}
        <p class="quiet">${t("models.on", { peers: wherePlaced(one.id, peers) || one.peers.map((id) => peers[id]?.name ?? id.slice(0, 8)).join(", ") })}</p></div>
      <div class="choices">
        <button type="button" disabled=${!may || busy[one.id]} aria-expanded=${placing === one.id ? "true" : "false"} onClick=${() => setPlacing(placing === one.id ? "" : one.id)}>${t(busy[one.id] ? "models.working" : "models.place")}<span class="hidden"> ${one.id}</span></button>
        <button type="button" class="primary" disabled=${!may || busy[one.id] || one.status === "loaded"} onClick=${() => place(one.id, { model: one.id })}>${t("models.load")}</button>
        <${Sure} label=${t("models.delete")} question=${t("models.sure", { name: one.id })} disabled=${!may || busy[one.id] || one.status === "loaded"} act=${() => remove(one)} />
      </div>
      ${placing === one.id && html`<${Place} key=${one.id} model=${one.id} layers=${one.num_layers} act=${placeIt(one.id)} close=${() => setPlacing("")} />`}
    </div>`)}</section>`;
}

/** The names of the peers that have the model, or parts of it. */
function wherePlaced(model, peers) {
  const all = Object.values(peers).sort((one, other) => one.name.localeCompare(other.name));
  return all.filter((peer) => (peer.models ?? []).includes(model) || (peer.partial_models ?? []).includes(model))
    .map((peer) => ((peer.models ?? []).includes(model) ? peer.name : t("models.part", { name: peer.name }))).join(", ");
}
