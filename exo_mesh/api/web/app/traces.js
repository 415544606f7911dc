// The traced requests of all peers, and the chosen one: its waterfall, its means and the raw document.
import { clock, number, seconds } from "./format.js";
import { call, mayAdmin, mesh } from "./mesh.js";
import { Raw } from "./raw.js";
import { html, useEffect, useState } from "./ui.js";
import { t } from "./strings.js";
import { Waterfall } from "./waterfall.js";
import { stageClass } from "./who_computed.js";

const SHOWN = 20;

export function Traces({ live, chosen, choose }) {
  const [found, setFound] = useState({ data: [], unreachable: [] });
  const [asked, ask] = useState(0);
  useEffect(() => {
    let wanted = true;
    call("/v1/traces/cluster").then((list) => wanted && setFound(list), () => {});
    return () => { wanted = false; };
  }, [live.requests.total, asked, mesh.base]);
  const remove = async (body) => {
    await call("/v1/traces/delete", { method: "POST", body }).catch(() => {});
    choose("");
    ask(asked + 1);
  };
  const rows = found.data.slice(0, SHOWN);
  return html`<section class="card traces"><h2>${t("traces.title")}</h2>
    ${found.unreachable.length > 0 && html`<p class="quiet">${t("traces.unreachable", { names: found.unreachable.map((peer) => peer.name).join(", ") })}</p>`}
    ${chosen && html`<${OneTrace} key=${chosen} id=${chosen} live=${live} close=${() => choose("")} />`}
    ${rows.length ? html`<div class="scroll" tabindex="0"><table>
      <thead><tr><th>${t("traces.entered")}</th><th>${t("chat.model")}</th><th>${t("running.entered")}</th><th>${t("requests.outcome")}</th>
        <th class="n">${t("requests.tokens")}</th><th class="n">${t("requests.took")}</th><th>${t("traces.trace")}</th></tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.peer + row.request_id}><td>${clock(row.entered)}</td><td>${row.model}</td><td>${row.peer_name}</td>
        <td><span class="pill status-${row.status}">${row.outcome}</span></td><td class="n">${number(row.prompt_tokens)} + ${number(row.output_tokens)}</td>
        <td class="n">${seconds(row.duration_s)}</td>
        <td><button type="button" aria-pressed=${chosen === row.trace_id} onClick=${() => choose(row.trace_id)}>${t("traces.show")}</button>
          ${mayAdmin() && html` <button type="button" class="danger" onClick=${() => remove({ trace_ids: [row.trace_id] })}>${t("models.delete")}</button>`}</td></tr>`)}</tbody>
    </table></div>
    ${mayAdmin() && html`<p><button type="button" class="danger" onClick=${() => remove({ all: true })}>${t("traces.deleteAll")}</button></p>`}` :
    html`<p class="quiet">${t("traces.none")}</p>`}
  </section>`;
}

function OneTrace({ id, live, close }) {
  const [trace, setTrace] = useState(null);
  const [stats, setStats] = useState(null);
  const [note, setNote] = useState("");
  useEffect(() => {
    let wanted = true;
    const path = `/v1/traces/${encodeURIComponent(id)}`;
    Promise.all([call(path), call(`${path}/stats`)]).then(([one, sums]) => {
      if (wanted) [setTrace, setStats].forEach((set, i) => set([one, sums][i]));
    }, (error) => wanted && setNote(error.message));
    return () => { wanted = false; };
  }, [id]);
  const named = (short) => Object.values(live.peers).find((peer) => short && peer.id.startsWith(short))?.name ?? short;
  return html`<div class="one-trace">
    <div class="head"><h3>${t("traces.of", { id })}</h3><button type="button" onClick=${close}>${t("traces.close")}</button></div>
    <p class="note" role="status">${note}</p>
    ${trace && stats && html`
      <p class="quiet">${t("traces.before", { place: seconds(stats.place_s), queue: seconds(stats.queue_s), first: seconds(stats.ttft_s), gap: seconds(stats.token_gap_s.p50) })}</p>
      <${Waterfall} trace=${trace} named=${named} />
      <${Stages} stats=${stats} named=${named} />
      <${Raw} read=${async () => trace} name="${id}.json" />`}
  </div>`;
}

/** The mean time that a lap spends at each stage and on each link. */
function Stages({ stats, named }) {
  if (!stats.stages.length) return html`<p class="quiet">${t("traces.noLaps")}</p>`;
  return html`<div class="scroll" tabindex="0"><table>
    <thead><tr><th>${t("traces.stage")}</th><th class="n">${t("traces.hop")}</th><th class="n">${t("traces.wait")}</th>
      <th class="n">${t("traces.prefill")}</th><th class="n">${t("traces.decode")}</th></tr></thead>
    <tbody>${stats.stages.map((one) => html`<tr key=${one.stage}><td><i class="swatch ${stageClass(one.stage)}" aria-hidden="true"></i> ${one.stage} ${named(one.peer)}</td><td class="n">${seconds(one.hop_s.mean)}</td>
      <td class="n">${seconds(one.wait_s.mean)}</td><td class="n">${one.prefill_s.count ? seconds(one.prefill_s.mean) : "–"}</td>
      <td class="n">${one.decode_s.count ? seconds(one.decode_s.mean) : "–"}</td></tr>`)}</tbody>
  </table></div>`;
}
