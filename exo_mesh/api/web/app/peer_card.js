// One peer: its memory, engines and layers; when opened also its details, its log, and the actions of an admin.
import { bytes, clock, number, percent, seconds } from "./format.js";
import { call, mayAdmin } from "./mesh.js";
import { MemoryBar, Sure } from "./parts.js";
import { html, useEffect, useRef, useState } from "./ui.js";
import { t } from "./strings.js";
import { rangeText, stageClass } from "./who_computed.js";

const LOG_EVERY_MS = 5000;
const LOG_LINES = 60;

export function PeerCard({ peer, live, level, isHere, isOpen, toggle }) {
  const stages = Object.values(live.instances).flatMap((one) => one.stages
    .map((stage, turn) => [turn, stage]).filter(([, stage]) => (stage.group?.peers ?? [stage.peer]).includes(peer.id))
    .map(([turn, stage]) => html`<div key=${`${one.id} ${turn}`}><i class="swatch ${stageClass(turn)}" aria-hidden="true"></i> ${one.model}: ${t("ring.layers", { layers: rangeText(stage.layers) })} (${stage.engine})</div>`));
  const known = [[t("mesh.temperature"), peer.temperature_c && `${number(peer.temperature_c)} °C`], [t("mesh.power"), peer.power_w && `${number(peer.power_w)} W`]];
  const accelerators = peer.hardware?.accelerators ?? [];
  const place = useRef(null);
  useEffect(() => { if (isOpen) place.current.scrollIntoView({ block: "nearest", behavior: "smooth" }); }, [isOpen]);
  return html`<article ref=${place} class="card peer-card ${isOpen ? "chosen" : ""}">
    <header><span class="dot level-${level}" aria-hidden="true"></span><h2>${peer.name}</h2>
      ${isHere && html`<span class="pill">${t("mesh.here")}</span>`}${peer.draining && html`<span class="pill state-loading">${t("ring.draining")}</span>`}
      ${peer.role === "api" && html`<span class="pill" title=${t("mesh.apiWhy")}>${t("ring.api")}</span>`}${peer.role === "edge" && html`<span class="pill" title=${t("mesh.edgeWhy")}>${t("mesh.edge")}</span>`}
      <span class="quiet">${t(`level.${level}`)}</span>
      <button type="button" class="small" aria-expanded=${isOpen ? "true" : "false"} onClick=${toggle}>${t(isOpen ? "mesh.less" : "mesh.more")}<span class="hidden"> ${peer.name}</span></button></header>
    <${MemoryBar} peer=${peer} />
    <p class="quiet">${!peer.total_bytes ? t("mesh.memoryUnknown") : t("mesh.memory", { free: bytes(peer.usable_bytes), total: bytes(peer.total_bytes), held: bytes(peer.reserved_bytes) })}</p>
    <dl>
      ${(peer.devices ?? []).map((device) => html`<dt>${device.kind}</dt><dd>${device.name} · ${(device.engines ?? []).filter((one) => one !== "dummy" || device.engine === one).join(", ")}</dd>`)}
      <dt>${t("mesh.load")}</dt><dd>${number(peer.load, 2)}${peer.devices?.[0]?.cores ? ` / ${t("mesh.cores", { n: peer.devices[0].cores })}` : ""}</dd>
      ${known.map(([name, value]) => value && html`<dt>${name}</dt><dd>${value}</dd>`)}
      ${accelerators.map((one) => html`<dt>${one.id}</dt><dd title=${t("mesh.sources", { names: sourcesOf(one) })}>${[one.name, ...figuresOf(one)].join(" · ")}</dd>`)}
      ${stages.length > 0 && html`<dt>${t("mesh.holds")}</dt><dd>${stages}</dd>`}
      ${isOpen && html`<dt>${t("mesh.address")}</dt><dd>${peer.api_url || peer.addresses?.[0] || "–"}</dd><dt>${t("mesh.version")}</dt><dd>${peer.version}</dd>
        <dt>id</dt><dd class="id">${peer.id}</dd><dt>${t("nav.models")}</dt><dd>${(peer.models ?? []).join(", ") || "–"}</dd>`}
    </dl>
    ${isOpen && html`<${Details} key=${peer.id} peer=${peer} />`}
  </article>`;
}

/** The readings of a GPU or NPU; values that could not be read are left out. */
function figuresOf(one) {
  const found = [];
  if (one.utilization !== undefined) found.push(t("mesh.busy", { share: percent(one.utilization) }));
  if (one.power_w !== undefined) found.push(`${number(one.power_w)} W`);
  if (one.temperature_c !== undefined) found.push(`${number(one.temperature_c)} °C`);
  if (one.memory_total_bytes !== undefined) found.push(t("mesh.used", { used: bytes(one.memory_used_bytes), total: bytes(one.memory_total_bytes) }));
  return found;
}

function sourcesOf(one) {
  return [...new Set(Object.values(one.sources ?? {}))].join(", ");
}

/** Details that only the peer itself knows, fetched when the card is opened. */
function Details({ peer }) {
  const [found, setFound] = useState(null);
  const [note, setNote] = useState("");
  useEffect(() => {
    let wanted = true;
    call(`/v1/diagnostics/cluster/${peer.id}`).then((answer) => wanted && setFound(answer), (error) => wanted && setNote(error.message));
    return () => { wanted = false; };
  }, [peer.id]);
  const act = (path, method) => () => {
    setNote("");
    call(`${path}?node_id=${peer.id}`, { method }).catch((error) => setNote(error.message));
  };
  const may = mayAdmin(), { runtime, resources, processes } = found ?? {};
  return html`<div class="details">
    <div class="choices">
      ${peer.draining
        ? html`<button type="button" disabled=${!may} onClick=${act("/admin/drain", "DELETE")}>${t("mesh.undrain")}</button>`
        : html`<button type="button" disabled=${!may} title=${t("mesh.drainWhy")} onClick=${act("/admin/drain", "POST")}>${t("mesh.drain")}</button>`}
      <${Sure} disabled=${!may} label=${t("mesh.restart")} question=${t("mesh.restartSure", { name: peer.name })} act=${act("/admin/restart", "POST")} />
      <${Sure} disabled=${!may} label=${t("mesh.stop")} question=${t("mesh.stopSure", { name: peer.name })} act=${act("/admin/stop", "POST")} />
    </div>
    <p class="note" role="alert">${note}</p>
    ${runtime && html`<dl>
      <dt>${t("mesh.system")}</dt><dd>${runtime.system}, Python ${runtime.python}</dd>
      <dt>${t("mesh.uptime")}</dt><dd>${uptime(runtime.uptime_s)}</dd>
      <dt>${t("mesh.disk")}</dt><dd>${t("mesh.diskFree", { free: bytes(resources?.disk?.free_bytes), total: bytes(resources?.disk?.total_bytes) })}</dd>
      <dt>${t("mesh.pressure")}</dt><dd>${t("requests.pressure", { n: number(resources?.memory?.pressure_pct, 1) })}</dd>
      <dt>${t("mesh.processes")}</dt><dd>${(processes ?? []).map((one) => html`<div>${one.name} · ${bytes(one.rss_bytes)} · ${t("mesh.cpu", { time: seconds(one.cpu_s) })}</div>`)}</dd>
    </dl>`}
    ${may ? html`<${Log} id=${peer.id} />` : html`<p class="quiet">${t("mesh.logAdmin")}</p>`}
  </div>`;
}

function Log({ id }) {
  const [lines, setLines] = useState(null);
  const [error, setError] = useState("");
  useEffect(() => {
    let wanted = true;
    const read = () => document.hidden || call(`/admin/log?node_id=${id}&n=${LOG_LINES}`).then(
      ({ data }) => wanted && (setLines(data), setError("")), (failure) => wanted && setError(failure.message));
    read();
    const timer = setInterval(read, LOG_EVERY_MS);
    return () => { wanted = false; clearInterval(timer); };
  }, [id]);
  return html`<h3>${t("mesh.log")}</h3><p class="note">${error}</p>
    ${lines && lines.length > 0 && html`<div class="log" tabindex="0" role="region" aria-label=${t("mesh.log")}><ol>${[...lines].reverse().map((line, index) => html`
      <li key=${index} class="log-${line.level}"><time>${clock(line.time)}</time> ${line.level === "info" ? "" : `${line.level}: `}${line.message}</li>`)}</ol></div>`}
    ${lines?.length === 0 && html`<p class="quiet">${t("mesh.logEmpty")}</p>`}`;
}

function uptime(value) {
  if (value === undefined) return "–";
  const minutes = Math.floor(value / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (days) return t("mesh.days", { n: days, hours: hours % 24 });
  return hours ? t("mesh.hours", { n: hours, minutes: minutes % 60 }) : minutes ? t("mesh.minutes", { n: minutes }) : seconds(value);
}
