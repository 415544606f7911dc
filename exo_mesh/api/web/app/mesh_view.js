// The mesh: its ring, its health with remedies, and what is known of each peer and link.
import { bytes, number, percent } from "./format.js";
import { mesh } from "./mesh.js";
import { Bar } from "./parts.js";
import { Ring, levelOf } from "./ring.js";
import { html, useState } from "./ui.js";
import { t } from "./strings.js";

export function MeshView() {
  const [chosenInstance, chooseInstance] = useState("");
  const [chosenPeer, choosePeer] = useState("");
  const live = mesh.document;
  if (!live) return html`<p class="quiet page">${t("mesh.waiting")}</p>`;
  const instances = Object.values(live.instances);
  const instance = live.instances[chosenInstance] ?? instances[0];
  const rate = instance ? mesh.rates[instance.id] ?? 0 : 0;
  return html`<div class="page">
    <div class="head"><h1>${t("mesh.title", { n: Object.keys(live.peers).length })}</h1>
      ${instances.length > 1 && html`<label>${t("mesh.instance")} <select value=${instance.id} onChange=${(event) => chooseInstance(event.target.value)}>
        ${instances.map((one) => html`<option key=${one.id} value=${one.id}>${one.id}</option>`)}</select></label>`}
      ${instance && html`<span class="pill state-${instance.state}">${instance.model} · ${t(`instance.${instance.state}`)}${rate > 0 ? ` · ${t("ring.rate", { n: number(rate, 1) })}` : ""}</span>`}
    </div>
    <${Health} health=${live.health} peers=${live.peers} />
    <div class="columns">
      <section class="card"><${Ring} document=${live} instance=${instance} rate=${rate} chosen=${chosenPeer} choose=${(id) => choosePeer(id === chosenPeer ? "" : id)} /></section>
      <section class="peers">${Object.values(live.peers).sort((one, other) => one.name.localeCompare(other.name)).map((peer) => html`
        <${PeerCard} key=${peer.id} peer=${peer} live=${live} isHere=${peer.id === live.node_id} isOpen=${peer.id === chosenPeer} />`)}</section>
    </div>
    <${Links} links=${Object.values(live.links)} peers=${live.peers} />
  </div>`;
}

function Health({ health, peers }) {
  const found = [
    ...(health?.reasons ?? []).map((reason) => ["", reason]),
    ...(health?.peer_health ?? []).flatMap((peer) => peer.reasons.map((reason) => [peers[peer.id]?.name ?? peer.name, reason])),
    ...(health?.instance_health ?? []).flatMap((one) => one.reasons.map((reason) => [one.id, reason])),
  ];
  const unique = [...new Map(found.map(([where, reason]) => [`${reason.code} ${reason.message}`, [where, reason]])).values()];
  if (!unique.length) return null;
  return html`<section class="health" aria-label=${t("mesh.health")}>${unique.map(([where, reason], index) => html`
    <div class="reason level-${reason.level}" key=${index}><strong>${where ? `${where}: ` : ""}${reason.message}</strong>
      ${reason.remedy && html`<span>${reason.remedy}</span>`}</div>`)}</section>`;
}

function PeerCard({ peer, live, isHere, isOpen }) {
  const used = peer.total_bytes ? 1 - peer.usable_bytes / peer.total_bytes : 0;
  const level = levelOf(live.health, peer.id);
  const stages = Object.values(live.instances).flatMap((one) => one.stages
    .filter((stage) => (stage.group?.peers ?? [stage.peer]).includes(peer.id))
    .map((stage) => `${one.model}: ${t("ring.layers", { layers: `${stage.layers[0]}–${stage.layers[1] - 1}` })} (${stage.engine})`));
  return html`<article class="card peer-card ${isOpen ? "chosen" : ""}">
    <header><span class="dot level-${level}" aria-hidden="true"></span><h2>${peer.name}</h2>
      ${isHere && html`<span class="pill">${t("mesh.here")}</span>`}<span class="quiet">${t(`level.${level}`)}</span></header>
    <${Bar} share=${used} level=${used > 0.9 ? "failed" : used > 0.75 ? "degraded" : "ok"} label=${t("mesh.memoryUsed", { share: percent(used) })} />
    <p class="quiet">${t("mesh.memory", { free: bytes(peer.usable_bytes), total: bytes(peer.total_bytes), held: bytes(peer.reserved_bytes) })}</p>
    <dl>
      ${(peer.devices ?? []).map((device) => html`<dt>${device.kind}</dt><dd>${device.name} · ${(device.engines ?? []).join(", ")}</dd>`)}
      <dt>${t("mesh.load")}</dt><dd>${number(peer.load, 2)}</dd>
      ${stages.length > 0 && html`<dt>${t("mesh.holds")}</dt><dd>${stages.map((stage) => html`<div>${stage}</div>`)}</dd>`}
      ${isOpen && html`<dt>${t("mesh.address")}</dt><dd>${peer.api_url}</dd><dt>${t("mesh.version")}</dt><dd>${peer.version}</dd>
        <dt>id</dt><dd class="id">${peer.id}</dd><dt>${t("nav.models")}</dt><dd>${(peer.models ?? []).join(", ") || "–"}</dd>`}
    </dl>
  </article>`;
}

function Links({ links, peers }) {
  if (!links.length) return null;
  const name = (id) => peers[id]?.name ?? id.slice(0, 8);
  return html`<section class="card"><h2>${t("links.title")}</h2><div class="scroll" tabindex="0"><table>
    <thead><tr><th>${t("links.between")}</th><th>${t("links.kind")}</th><th class="n">${t("links.rtt")}</th><th class="n">${t("links.speed")}</th></tr></thead>
    <tbody>${links.map((link) => html`<tr><td>${name(link.from)} → ${name(link.to)}</td><td>${link.paths?.map((path) => path.kind).join(", ") || "–"}</td>
      <td class="n">${link.rtt_ms === undefined ? "–" : `${number(link.rtt_ms, 2)} ms`}</td><td class="n">${link.mb_per_s ? `${number(link.mb_per_s)} MB/s` : "–"}</td></tr>`)}</tbody>
  </table></div></section>`;
}
