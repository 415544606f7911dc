// Decides whether a model can answer now, or what it waits for.
import { bytes, percent, seconds } from "./format.js";
import { t } from "./strings.js";

/** {state, text, share}. state: "ready", "waiting" (it is loading), "absent" (the user must load it) or "failed". */
export function readinessOf(model, live) {
  const placed = Object.values(live?.instances ?? {}).filter((one) => one.model === model);
  if (placed.some((one) => one.state === "ready")) return { state: "ready", text: "", share: null };
  const loading = placed.find((one) => one.state === "loading");
  if (loading) return { state: "waiting", ...loadingOf(loading, live) };
  const fetched = fetchingOf(model, Object.values(live?.downloads ?? {}), live);
  if (fetched) return { state: "waiting", ...fetched };
  const failed = placed.find((one) => one.state === "failed");
  if (failed) return { state: "failed", text: t("ready.failed", { model, why: failed.reason }), share: null };
  return { state: "absent", text: t("ready.absent", { model }), share: null };
}

function loadingOf(instance, live) {
  const downloads = instance.stages.flatMap((stage) => (stage.downloads ?? []).map((one) => ({ ...one, model: instance.model })));
  const names = instance.stages.map((stage) => live.peers?.[stage.peer]?.name ?? t("ring.lost"));
  return fetchingOf(instance.model, downloads, live) ?? { text: t("ready.loading", { model: instance.model, peers: names.join(", ") }), share: null };
}

function fetchingOf(model, downloads, live) {
  const mine = downloads.filter((one) => one.model === model && (one.state === "ongoing" || one.state === "pending"));
  if (!mine.length) return null;
  const sum = (name) => mine.reduce((total, one) => total + (one[name] ?? 0), 0);
  const done = sum("done_bytes"), total = sum("total_bytes"), eta = Math.max(...mine.map((one) => one.eta_s ?? 0));
  const share = total ? done / total : 0;
  const names = mine.map((one) => live.peers?.[one.peer]?.name ?? one.peer.slice(0, 8)).join(", ");
  const rest = eta ? `, ${seconds(eta)}` : "";
  return { text: `${t("ready.fetching", { model, peers: names, share: percent(share), done: bytes(done), total: bytes(total) })}${rest}`, share };
}
