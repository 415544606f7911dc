// Models: what is loaded, what is on which disk, what is being fetched; load, unload, fetch and delete.
import { bytes, number, percent, seconds } from "./format.js";
import { call, mayAdmin, mesh } from "./mesh.js";
import { inPath, reloadModels, useModels } from "./models.js";
import { Bar } from "./parts.js";
import { html, useRef, useState } from "./ui.js";
import { t } from "./strings.js";

const PLACE_MS = 3600000; // a placement may wait for a download

export function ModelsView() {
  const { list, error } = useModels();
  const [busy, setBusy] = useState({});
  const [note, setNote] = useState("");
  const live = mesh.document;
  /** One change at a time for each thing; its error is shown as the node says it. */
  const act = async (name, path, options) => {
    setBusy((now) => ({ ...now, [name]: true }));
    setNote("");
    try {
      await call(path, options);
    } catch (failure) {
      setNote(failure.message);
    }
    setBusy(({ [name]: done, ...others }) => others);
    reloadModels();
  };
  const may = mayAdmin();
  return html`<div class="page">
    <div class="head"><h1>${t("nav.models")}</h1></div>
    ${!may && mesh.hello && html`<p class="quiet">${t("models.readOnly")}</p>`}
    <p class="note" role="alert">${note || error?.message || ""}</p>
    <${Pull} may=${may} pull=${(model) => act(`pull ${model}`, "/download/start", { method: "POST", body: { model } })} />
    <${Downloads} downloads=${Object.values(live?.downloads ?? {})} peers=${live?.peers ?? {}} may=${may} act=${act} />
    <${Loaded} instances=${Object.values(live?.instances ?? {})} peers=${live?.peers ?? {}} may=${may} busy=${busy} act=${act} />
    <${OnDisk} list=${list} peers=${live?.peers ?? {}} may=${may} busy=${busy} act=${act} />
  </div>`;
}

function Pull({ may, pull }) {
  const field = useRef(null);
  const submit = (event) => {
    event.preventDefault();
    if (field.current.value.trim()) pull(field.current.value.trim());
  };
  return html`<form class="card row" onSubmit=${submit}>
    <label>${t("models.pullLabel")}<input ref=${field} placeholder="Qwen/Qwen3-0.6B" spellcheck="false" autocapitalize="off" disabled=${!may} /></label>
    <button class="primary" type="submit" disabled=${!may}>${t("models.pull")}</button>
  </form>`;
}

function Downloads({ downloads, peers, may, act }) {
  if (!downloads.length) return null;
  return html`<section class="card"><h2>${t("models.downloads")}</h2>${downloads.map((one) => {
    const share = one.total_bytes ? one.done_bytes / one.total_bytes : 0;
    const where = peers[one.peer]?.name ?? one.peer;
    return html`<div class="download" key=${`${one.peer} ${one.model}`}>
      <div class="row"><strong>${one.model}</strong><span class="quiet">${where} · ${t(`download.${one.state}`)}</span>
        ${one.state !== "completed" && html`<button type="button" disabled=${!may} onClick=${() => act(`stop ${one.model}`, `/download/${one.peer}/${inPath(one.model)}`, { method: "DELETE" })}>${t("models.cancel")}</button>`}</div>
      <${Bar} share=${share} level=${one.state === "failed" ? "failed" : "ok"} label=${percent(share)} />
      <p class="quiet">${t("models.progress", { share: percent(share), done: bytes(one.done_bytes), total: bytes(one.total_bytes) })}
        ${one.bytes_per_s ? ` · ${bytes(one.bytes_per_s)}/s` : ""}${one.eta_s ? ` · ${seconds(one.eta_s)}` : ""} ${one.reason ?? ""}</p>
    </div>`;
  })}</section>`;
}

function Loaded({ instances, peers, may, busy, act }) {
  return html`<section class="card"><h2>${t("models.loaded")}</h2>
    ${!instances.length && html`<p class="quiet">${t("models.noneLoaded")}</p>`}
    ${instances.map((one) => html`<div class="item" key=${one.id}>
      <div><strong>${one.model}</strong> <span class="pill state-${one.state}">${t(`instance.${one.state}`)}</span>
        <p class="quiet">${one.stages.map((stage) => `${peers[stage.peer]?.name ?? (stage.peer ?? "").slice(0, 8)} ${stage.layers[0]}–${stage.layers[1] - 1}`).join(" → ")} · ${t("models.context", { n: number(one.context_limit) })}${one.reason ? ` · ${one.reason}` : ""}</p></div>
      <button type="button" disabled=${!may || busy[one.id]} onClick=${() => act(one.id, `/instance/${encodeURIComponent(one.id)}`, { method: "DELETE" })}>${t("models.unload")}</button>
    </div>`)}</section>`;
}

function OnDisk({ list, peers, may, busy, act }) {
  const remove = (one) => {
    if (confirm(t("models.sure", { name: one.id }))) act(one.id, `/v1/models/${inPath(one.id)}`, { method: "DELETE" });
  };
  return html`<section class="card"><h2>${t("models.onDisk")}</h2>
    ${!list.length && html`<p class="quiet">${t("models.none")}</p>`}
    ${list.map((one) => html`<div class="item" key=${one.id}>
      <div><strong>${one.id}</strong>
        <p class="quiet">${[bytes(one.num_bytes), t("models.layers", { n: one.num_layers }), one.quantization || one.dtype, one.peers.map((id) => peers[id]?.name ?? id.slice(0, 8)).join(", ")].filter(Boolean).join(" · ")}</p></div>
      <div class="choices">
        <button type="button" disabled=${!may || busy[one.id] || one.status === "loaded"} onClick=${() => act(one.id, "/instance", { method: "POST", body: { model: one.id }, timeoutMs: PLACE_MS })}>${t(busy[one.id] ? "models.working" : "models.load")}</button>
        <button type="button" class="danger" disabled=${!may || busy[one.id] || one.status === "loaded"} onClick=${() => remove(one)}>${t("models.delete")}</button>
      </div>
    </div>`)}</section>`;
}
