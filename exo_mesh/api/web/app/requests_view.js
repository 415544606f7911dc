// The requests view: running requests, the outcomes of the last ones, traces, and diagnostics of the nodes.
import { Stages } from "./attribution.js";
import { Diagnostics } from "./diagnostics.js";
import { bytes, clock, number, percent, seconds } from "./format.js";
import { call, mesh } from "./mesh.js";
import { Bar, Curve, Tile } from "./parts.js";
import { Running } from "./running_list.js";
import { Traces } from "./traces.js";
import { html, useEffect, useState } from "./ui.js";
import { t } from "./strings.js";

const SHOWN = 20;

export function RequestsView() {
  const live = mesh.document;
  const recent = useRecent(live);
  const [chosen, choose] = useState("");
  if (!live) return html`<p class="quiet page">${t("mesh.waiting")}</p>`;
  const { queue, requests: stats, memory } = live;
  const top = Math.max(100, ...mesh.memory.map(([, value]) => value ?? 0));
  return html`<div class="page">
    <div class="head"><h1>${t("nav.requests")}</h1><span class="quiet">${t("requests.scope", { name: live.peers[live.node_id]?.name ?? "" })}</span></div>
    <dl class="tiles">
      <${Tile} label=${t("requests.running")} value=${number(queue.in_progress)} />
      <${Tile} label=${t("requests.waiting")} value="${number(queue.waiting)} / ${number(queue.max)}" level=${queue.waiting >= queue.max ? "degraded" : ""} />
      <${Tile} label=${t("requests.total")} value=${number(stats.total)} />
      <${Tile} label=${t("requests.errors")} value=${percent(stats.error_rate)} level=${stats.error_rate > 0.05 ? "failed" : ""} />
      <${Tile} label=${t("requests.speed")} value=${number(stats.avg_tokens_per_s, 1)} />
      <${Tile} label=${t("requests.p50")} value=${seconds(stats.latency_s?.p50)} />
      <${Tile} label=${t("requests.p95")} value=${seconds(stats.latency_s?.p95)} />
      <${Tile} label=${t("requests.ttft")} value=${seconds(stats.ttft_s?.p50)} />
    </dl>
    <${Running} live=${live} />
    <section class="card"><h2>${t("requests.memory")}</h2>
      <${Curve} points=${mesh.memory} most=${top} label=${t("requests.pressure", { n: number(memory?.pressure_pct, 1) })} />
      <p class="quiet">${t("requests.pressure", { n: number(memory?.pressure_pct, 1) })} · ${t("ring.free", { bytes: bytes(memory?.available_bytes) })} · ${t("requests.peak", { n: number(memory?.peak_pct, 1), critical: number(memory?.threshold_pct, 1) })}</p></section>
    <${KvPools} stages=${memory?.stages ?? []} />
    <section class="card"><h2>${t("requests.last", { n: SHOWN })}</h2><${Table} rows=${recent} choose=${choose} /></section>
    <${Traces} live=${live} chosen=${chosen} choose=${choose} />
    <${Diagnostics} />
  </div>`;
}

/** The KV pools of the rings whose driver is on this node; only the driver knows how full they are. */
function KvPools({ stages }) {
  const pools = stages.filter((stage) => stage.kv_pool_tokens > 0);
  return pools.length > 0 && html`<section class="card"><h2>${t("kv.title")}</h2>
    ${pools.map((pool) => {
      const label = t("kv.used", { used: number(pool.kv_tokens), pool: number(pool.kv_pool_tokens), sequences: number(pool.sequences), evictions: number(pool.evictions) });
      return html`<p key=${pool.instance}>${pool.instance}</p><${Bar} share=${pool.kv_tokens / pool.kv_pool_tokens} label=${label} /><p class="quiet">${label}${prefixLine(pool.prefix_cache)}</p>`;
    })}</section>`;
}

/** What the prefix cache keeps, and how often prompts used it; empty where it is off. */
function prefixLine(cache) {
  if (!cache?.on) return "";
  const figures = { tokens: number(cache.tokens), hits: number(cache.hits), lookups: number(cache.hits + cache.misses), saved: number(cache.hit_tokens) };
  return ` · ${t("kv.prefix", figures)}`;
}

/** The last requests, fetched again when the totals have changed. */
function useRecent(live) {
  const [rows, setRows] = useState([]);
  const total = live?.requests?.total ?? 0;
  useEffect(() => {
    let wanted = true;
    call(`/requests/recent?n=${SHOWN}`).then(({ requests }) => wanted && setRows(requests), () => {});
    return () => { wanted = false; };
  }, [total, mesh.base]);
  return rows;
}

function Table({ rows, choose }) {
  if (!rows.length) return html`<p class="quiet">${t("requests.none")}</p>`;
  return html`<div class="scroll" tabindex="0"><table>
    <thead><tr><th>${t("requests.ended")}</th><th>${t("chat.model")}</th><th>${t("requests.outcome")}</th><th class="n">${t("requests.tokens")}</th>
      <th class="n">${t("requests.first")}</th><th class="n">${t("requests.took")}</th><th class="n">${t("requests.speed")}</th><th>${t("who.label")}</th><th>${t("traces.trace")}</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.request_id}><td>${clock(row.ended_at)}</td><td>${row.model}</td>
      <td><span class="pill status-${row.status}">${row.outcome}</span></td><td class="n">${number(row.prompt_tokens)}${row.cached_tokens ? ` (${t("requests.cached", { n: number(row.cached_tokens) })})` : ""} + ${number(row.output_tokens)}${row.accepted_drafts ? ` (${t("requests.drafted", { n: number(row.accepted_drafts) })})` : ""}</td>
      <td class="n">${seconds(row.ttft_s)}</td><td class="n">${seconds(row.duration_s)}</td><td class="n">${number(row.tokens_per_s, 1)}</td>
      <td>${row.stages?.length ? html`<div class="computed-by"><${Stages} stages=${row.stages} /></div>` : "–"}</td>
      <td>${row.trace_id ? html`<button type="button" onClick=${() => choose(row.trace_id)}>${t("traces.show")}</button>` : "–"}</td></tr>`)}</tbody>
  </table></div>`;
}
