// The diagnostics of each node, fetched when the user opens them; captures for admins; the last phases of all runners.
import { bytes, clock, number, seconds } from "./format.js";
import { call, mayAdmin } from "./mesh.js";
import { Raw } from "./raw.js";
import { html, useState } from "./ui.js";
import { t } from "./strings.js";

const EVENTS = 30;

export function Diagnostics() {
  const [found, setFound] = useState(null);
  const [events, setEvents] = useState([]);
  const [note, setNote] = useState("");
  const look = async () => {
    setNote(t("raw.reading"));
    try {
      const [cluster, timeline] = await Promise.all([call("/v1/diagnostics/cluster"), call("/v1/diagnostics/cluster/timeline")]);
      setFound(cluster);
      setEvents(timeline.entries.slice(-EVENTS).reverse());
      setNote("");
    } catch (error) {
      setNote(error.message);
    }
  };
  return html`<section class="card diagnostics"><h2>${t("diagnostics.title")}</h2>
    <p><button type="button" onClick=${look}>${t(found ? "diagnostics.again" : "diagnostics.look")}</button></p>
    <p class="note" role="status">${note}</p>
    ${found && html`
      ${found.unreachable.map((peer) => html`<p key=${peer.id} class="reason level-failed"><strong>${peer.name}</strong><span>${peer.why}</span></p>`)}
      ${found.nodes.map((node) => html`<${NodeDiagnostics} key=${node.node_id} node=${node} />`)}
      <h3>${t("diagnostics.events", { n: EVENTS })}</h3>
      <div class="scroll" tabindex="0"><table>
        <thead><tr><th>${t("diagnostics.at")}</th><th>${t("diagnostics.node")}</th><th>${t("diagnostics.runner")}</th><th>${t("diagnostics.phase")}</th><th class="n">${t("requests.took")}</th></tr></thead>
        <tbody>${events.map((one, i) => html`<tr key=${i}><td>${clock(one.at)}</td><td>${one.name}</td><td>${one.runner}</td><td>${one.phase} ${one.detail}</td><td class="n">${seconds(one.until - one.at)}</td></tr>`)}</tbody>
      </table></div>`}
  </section>`;
}

function NodeDiagnostics({ node }) {
  const { runtime, resources, processes, stages } = node;
  const facts = [runtime.version, runtime.system, t("diagnostics.uptime", { n: number(runtime.uptime_s / 3600, 1) }), `${t("mesh.load")} ${resources.load.map((one) => number(one, 2)).join(" ")}`,
    t("diagnostics.processes", { n: number(processes.length), bytes: bytes(processes.reduce((sum, one) => sum + one.rss_bytes, 0)) }), t("diagnostics.stages", { n: number(stages.length) })];
  const capture = () => call(`/v1/diagnostics/cluster/${node.node_id}/capture`, { method: "POST" });
  return html`<div class="item"><div><strong>${node.name}</strong><p class="quiet">${facts.join(" · ")}</p>
    <${Raw} read=${async () => node} name="${node.name}.json" />
    ${mayAdmin() && html`<${Raw} read=${capture} name="${node.name}-capture.json" label=${t("diagnostics.capture")} />`}</div></div>`;
}
