// Lists the running answers of all peers that this caller may see, and the queue of each instance.
import { number } from "./format.js";
import { call, mesh } from "./mesh.js";
import { html, useEffect, useState } from "./ui.js";
import { t } from "./strings.js";

/** The list of GET /v1/streams, fetched again with each live document while an answer runs. */
function useRunning(live) {
  const [rows, setRows] = useState([]);
  const busy = live.queue.depth > 0 || live.queue.entered > 0 || Object.values(mesh.rates).some((rate) => rate > 0);
  useEffect(() => {
    let wanted = true;
    if (busy || rows.length) call("/v1/streams").then(({ data }) => wanted && setRows(data), () => {});
    return () => { wanted = false; };
  }, [live.time, mesh.base]);
  return rows;
}

export function Running({ live }) {
  const rows = useRunning(live);
  const stop = (id) => call(`/v1/streams/${encodeURIComponent(id)}`, { method: "DELETE" }).catch(() => {});
  const queues = live.queue.instances ?? [];
  return html`<section class="card"><h2>${t("running.title")}</h2>
    ${queues.map((one) => html`<p key=${one.instance} class="queue"><span>${one.instance}</span>
      <${Places} running=${one.running} waiting=${one.waiting} />
      <span class="quiet">${t("running.queue", { running: number(one.running), waiting: number(one.waiting) })}</span></p>`)}
    ${rows.length ? html`<div class="scroll" tabindex="0"><table>
      <thead><tr><th>${t("running.id")}</th><th>${t("chat.model")}</th><th>${t("running.entered")}</th><th>${t("running.state")}</th>
        <th class="n">${t("requests.tokens")}</th><th class="n">${t("running.age")}</th><th>${t("running.stop")}</th></tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.id}><td class="id">${row.id}</td><td>${row.model}</td><td>${live.peers[row.peer]?.name ?? row.peer}</td>
        <td><span class="pill state-${row.state === "generating" ? "ready" : "loading"}">${t(`running.${row.state === "generating" ? "generating" : "waiting"}`)}</span></td>
        <td class="n">${number(row.output_tokens)}</td><td class="n">${number(Math.max(0, live.time - row.created))} s</td>
        <td><button type="button" class="danger" onClick=${() => stop(row.id)}>${t("chat.stop")}</button></td></tr>`)}</tbody>
    </table></div>` : html`<p class="quiet">${t("running.none")}</p>`}
  </section>`;
}

/** A square for each request of a queue; running requests come first. */
function Places({ running, waiting }) {
  const most = 40, shown = Math.min(most, running + waiting);
  return html`<svg class="places" viewBox="0 0 ${10 * most} 10" aria-hidden="true" preserveAspectRatio="xMinYMid meet">
    ${Array.from({ length: shown }, (_, i) => html`<rect key=${i} x=${10 * i} width="8" height="8" y="1" class=${i < running ? "runs" : "waits"} />`)}</svg>`;
}
