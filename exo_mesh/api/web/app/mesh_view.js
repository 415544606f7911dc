// The mesh view: the ring, health problems with remedies, events, and the details of each peer and link.
import { isRecovering } from "./changes.js";
import { clock, number, seconds } from "./format.js";
import { mesh, rateOf } from "./mesh.js";
import { PeerCard } from "./peer_card.js";
import { Ring, levelOf, stateOf } from "./ring.js";
import { RingTip } from "./ring_tip.js";
import { html, useEffect, useReducer, useState } from "./ui.js";
import { t } from "./strings.js";
import { COLOURS, rangeText, sentence, stageClass } from "./who_computed.js";

const TICK_MS = 250;
const narrow = matchMedia("(max-width: 720px)");

export function MeshView() {
  const [chosenInstance, chooseInstance] = useState("");
  const [chosenPeer, choosePeer] = useState("");
  const [pointed, point] = useState({ id: "", place: null });
  const isNarrow = useNarrow();
  const live = mesh.document;
  if (!live) return html`<p class="quiet page">${t("mesh.waiting")}</p>`;
  const instances = Object.values(live.instances);
  const instance = live.instances[chosenInstance] ?? instances[0];
  const rate = rateOf(instance);
  const recovers = Boolean(instance) && instance.state === "loading" && isRecovering(mesh.events, instance.id);
  const story = mesh.events.findLast((one) => one.kind === "recovered" && one.changes?.length && one.id === instance?.id);
  const peers = Object.values(live.peers).sort((one, other) => one.name.localeCompare(other.name));
  const choose = (id) => { point({ id: "", place: null }); choosePeer(id === chosenPeer ? "" : id); };
  return html`<div class="page">
    <div class="head"><h1>${t("mesh.title", { n: peers.length })}</h1>
      ${instances.length > 1 && html`<label>${t("mesh.instance")} <select value=${instance.id} onChange=${(event) => chooseInstance(event.target.value)}>
        ${instances.map((one) => html`<option key=${one.id} value=${one.id}>${one.id}</option>`)}</select></label>`}
      ${instance && html`<span class="pill state-${instance.state}">${instance.model} · ${stateOf(instance, rate, recovers)}</span>`}
    </div>
    ${recovers && html`<${Recovery} key=${instance.id} instance=${instance} live=${live} />`}
    <${Health} health=${live.health} peers=${live.peers} />
    <div class="columns">
      <div class="picture">
        <section class="card ring-card">
          <${Ring} document=${live} instance=${instance} rate=${rate} isNarrow=${isNarrow} isRecovering=${recovers} chosen=${chosenPeer} choose=${choose}
            point=${(id, place) => point({ id, place })} />
          <${RingTip} live=${live} id=${pointed.id} place=${pointed.place} />
          ${story && html`<p class="story" role="status">${storyOf(story)}</p>`}
          <p class="quiet legend">
            ${instance && html`<span><span class="swatches" aria-hidden="true">${instance.stages.slice(0, COLOURS).map((_, turn) => html`<i key=${turn} class="swatch ${stageClass(turn)}"></i>`)}</span>${t("ring.keyLayers")}</span>`}
            <span><i class="key models" aria-hidden="true"></i>${t("ring.keyModels")}</span><span><i class="key used" aria-hidden="true"></i>${t("ring.keyUsed")}</span>
            ${rate.frames > 0 && html`<span class="figures">${t("ring.frames", { n: number(rate.frames, 1) })}</span>`}</p>
        </section>
        <${Events} events=${mesh.events} />
      </div>
      <section class="peers" aria-label=${t("mesh.peers")}>${peers.map((peer) => html`
        <${PeerCard} key=${peer.id} peer=${peer} live=${live} level=${levelOf(live.health, peer.id)} isHere=${peer.id === live.node_id}
          isOpen=${peer.id === chosenPeer} toggle=${() => choose(peer.id)} />`)}</section>
    </div>
    <${Links} live=${live} />
  </div>`;
}

function useNarrow() {
  const [isNarrow, setNarrow] = useState(narrow.matches);
  useEffect(() => {
    const look = () => setNarrow(narrow.matches);
    narrow.addEventListener("change", look);
    return () => narrow.removeEventListener("change", look);
  }, []);
  return isNarrow;
}

/** Shows how long a ring has been recovering, and which peers hold its layers now. */
function Recovery({ instance, live }) {
  const [began] = useState(() => performance.now());
  const [, tick] = useReducer((count) => count + 1, 0);
  useEffect(() => {
    const timer = setInterval(tick, TICK_MS);
    return () => clearInterval(timer);
  }, []);
  const name = (stage) => live.peers[stage.peer]?.name ?? t("ring.lost");
  return html`<section class="reason level-degraded recovery" role="status"><strong><span class="spinner" aria-hidden="true"></span> ${t("mesh.recovering", { model: instance.model, time: seconds((performance.now() - began) / 1000) })}</strong>
    <span>${instance.stages.map((stage) => `${name(stage)} ${rangeText(stage.layers)}`).join(" → ")}</span></section>`;
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

/** What happened in a recovery: "bob stopped; carol took over layers 3–5 after 3.8 s". */
function storyOf({ changes }) {
  return changes.map((one) => sentence(one)).join("; ");
}

function Events({ events }) {
  if (!events.length) return null;
  const text = (one) => `${t(`event.${one.kind}`, { name: one.name })}${one.changes?.length ? `: ${storyOf(one)}` : one.took ? ` (${seconds(one.took)})` : ""}`;
  return html`<section class="card"><h2>${t("mesh.events")}</h2><ul class="events">${[...events].reverse().map((one) => html`
    <li key=${`${one.time} ${one.kind} ${one.name}`} class="event-${one.kind}"><time>${clock(one.time)}</time> ${text(one)}</li>`)}</ul></section>`;
}

function Links({ live }) {
  const links = Object.values(live.links), cables = live.cables ?? [];
  if (!links.length && !cables.length) return null;
  const name = (id) => live.peers[id]?.name ?? id.slice(0, 8);
  const kinds = (link) => [...new Set(link.paths?.map((path) => path.kind) ?? [link.kind])].filter(Boolean).join(", ") || "–";
  return html`<section class="card"><h2>${t("links.title")}</h2><div class="scroll" tabindex="0" role="region" aria-label=${t("links.title")}><table>
    <thead><tr><th>${t("links.between")}</th><th>${t("links.kind")}</th><th class="n">${t("links.rtt")}</th><th class="n">${t("links.speed")}</th></tr></thead>
    <tbody>${links.map((link) => html`<tr key=${`${link.from} ${link.to}`}><td>${name(link.from)} → ${name(link.to)}</td><td>${kinds(link)}</td>
      <td class="n">${link.rtt_ms ? `${number(link.rtt_ms, 2)} ms` : "–"}</td><td class="n">${link.mb_per_s ? `${number(link.mb_per_s)} MB/s${link.mb_per_s_at ? `, ${clock(link.mb_per_s_at)}` : ""}` : "–"}</td></tr>`)}
      ${cables.map((cable, index) => html`<tr key=${index}><td>${cable.ends.map((end) => `${name(end.peer)} ${end.device}`).join(" – ")}</td>
        <td>${cable.transport === "rdma" ? "Thunderbolt, RDMA" : "Thunderbolt"}</td><td class="n">–</td><td class="n">${cable.speed || "–"}</td></tr>`)}</tbody>
  </table></div></section>`;
}
