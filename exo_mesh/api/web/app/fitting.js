// What fits this mesh: the weights of a model against the memory that the peers have free, and which models to offer
// first. Pure.
import { bytes } from "./format.js";
import { t } from "./strings.js";

const ROOM = 1.1; // weights, and about a tenth for the KV cache and the engine
const QUICK_BYTES = 2e9; // a model of this size is here soon, and answers fast on any machine
const NO_WEIGHTS = new Set(["dummy", "llamacpp"]); // the one reads no files, the other only GGUF

/** The size of a model; isAbout: an estimate from its card. 0 bytes: unknown. */
export function sizeOf(model) {
  return model.num_bytes > 1 ? { bytes: model.num_bytes, isAbout: false } : { bytes: model.estimated_bytes ?? 0, isAbout: true };
}

export function sizeText(model) {
  const { bytes: value, isAbout } = sizeOf(model);
  return !value ? "" : isAbout ? t("fit.about", { size: bytes(value) }) : bytes(value);
}

/** The peers that may hold layers, those with the most free memory first. */
function holders(peers) {
  return Object.values(peers).filter((one) => one.role !== "api" && !one.draining && one.usable_bytes > 0).sort((one, other) => other.usable_bytes - one.usable_bytes);
}

/** Where a model fits now: {kind: "each", n, all}: on each of n machines alone; {kind: "together", n, all}: over n of
 * them; {kind: "no", need, have}; null if its size or the memory is not known. */
export function fitOf(model, peers) {
  const free = holders(peers).map((one) => one.usable_bytes), need = Math.round(sizeOf(model).bytes * ROOM);
  if (!need || !free.length) return null;
  const alone = free.filter((one) => one >= need).length;
  if (alone) return { kind: "each", n: alone, all: free.length };
  let sum = 0;
  for (let n = 1; n <= free.length; n += 1) {
    sum += free[n - 1];
    if (sum >= need) return { kind: "together", n, all: free.length };
  }
  return { kind: "no", need, have: sum };
}

export function fitText(fit) {
  if (!fit) return "";
  if (fit.kind === "no") return t("fit.no", { need: bytes(fit.need), have: bytes(fit.have) });
  return t(fit.kind === "each" ? "fit.each" : "fit.together", { n: fit.n, all: fit.all });
}

/** Whether an engine of the mesh runs the architecture, and probably reads the weights as they are published. An older
 * node does not say which engines run it. */
function isComputed(model, engines) {
  const found = (model.engines ?? [...engines]).filter((one) => engines.has(one) && !NO_WEIGHTS.has(one));
  const isMlx = model.id.startsWith("mlx-community/"); // of other quantisations only the headers say who reads them
  return isMlx ? found.includes("mlx") : found.length > 0 && !model.quantization;
}

/** Higher for models that people ask for: a card whose alias is the bare name of its family, such as qwen3, is the one
 * that this name means everywhere. */
function rank(model, fit) {
  const features = model.features ?? [];
  const isNamed = (model.aliases ?? []).some((alias) => !alias.includes(":"));
  return (isNamed ? 4 : 0) + (fit.kind === "each" ? 2 : 0) + (features.includes("tools") ? 1 : 0) + (features.includes("thinking_toggle") ? 1 : 0);
}

/** Models to offer first: one that is here soon, then the best of each family that fits. known: from the cards. */
export function suggested(known, peers, most = 6) {
  const engines = new Set(Object.values(peers).flatMap((peer) => (peer.devices ?? []).flatMap((device) => device.engines ?? [])));
  const fitting = known.filter((one) => one.tasks?.includes("text_generation") && isComputed(one, engines)).map((one) => ({ model: one, fit: fitOf(one, peers), size: sizeOf(one).bytes })).filter(({ fit }) => fit && fit.kind !== "no");
  const order = (one, other) => rank(other.model, other.fit) - rank(one.model, one.fit) || other.size - one.size || one.model.id.localeCompare(other.model.id);
  const best = new Map();
  for (const one of [...fitting].sort(order)) if (!best.has(one.model.family)) best.set(one.model.family, one);
  const small = fitting.filter(({ model, size }) => size <= QUICK_BYTES && model.features?.includes("tools")).sort((one, other) => rank(other.model, other.fit) - rank(one.model, one.fit) || other.size - one.size)[0];
  const found = [small, ...[...best.values()].sort(order)].filter(Boolean);
  return [...new Map(found.map((one) => [one.model.id, one])).values()].slice(0, most);
}
