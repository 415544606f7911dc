// Who computed an answer, and who took over: asked of the entry peer while the answer runs, shown under the answer.
import { fetchAt, mesh, nameOf } from "./mesh.js";
import { html } from "./ui.js";
import { t } from "./strings.js";
import { joined, rangeText, sentence, stageClass, takeovers } from "./who_computed.js";

const ASK_MS = 2000; // an answer does not wait longer for this
const kept = new Map(); // request id → what is known of a running answer

/** What is known of who computes a running answer; asks the entry peer again when the rings of the mesh have changed.
 * changed(): called when more is known. */
export function workOf(requestId, answer, changed) {
  const one = kept.get(requestId) ?? { base: mesh.base, earlier: [], legs: [], entries: [], document: null, rings: "", length: 0, grewAt: 0, gap: null, isAsking: false };
  kept.set(requestId, one);
  const length = answer.text.length + answer.reasoning.length, now = Date.now();
  if (one.base !== mesh.base && !one.gap) one.gap = { left: nameOf(one.base), since: one.grewAt };
  if (length > one.length) {
    if (one.gap) passOn(one, now);
    Object.assign(one, { length, grewAt: now });
    if (hasChanged(one)) ask(requestId, one).then(changed);
  }
  return shown(one);
}

/** What is known at the end of an answer; forgets the request. */
export async function finalWork(requestId) {
  const one = kept.get(requestId);
  if (!one) return null;
  await ask(requestId, one);
  kept.delete(requestId);
  return shown(one);
}

/** The answer has grown at another node for the first time: its legs come after those of the node before. */
function passOn(one, now) {
  const pause_s = one.gap.since ? (now - one.gap.since) / 1000 : null;
  one.entries.push({ lost: [], took: [], restarted: [], pause_s, entry: { left: one.gap.left, next: nameOf(mesh.base) } });
  Object.assign(one, { base: mesh.base, earlier: shownLegs(one), legs: [], pause_s, gap: null, rings: "" });
}

/** Whether the rings of the mesh are others than at the last question. */
function hasChanged(one) {
  if (one.document === mesh.document && one.rings) return false;
  one.document = mesh.document;
  const rings = JSON.stringify(Object.values(mesh.document?.instances ?? {}).map(({ id, ballot, state }) => [id, ballot, state])) || "none";
  const isOther = rings !== one.rings;
  one.rings = rings;
  return isOther;
}

async function ask(requestId, one) {
  if (one.isAsking) return;
  one.isAsking = true;
  const base = one.base;
  try {
    const reply = await fetchAt(base, `/v1/requests/${encodeURIComponent(requestId)}/stages`, { signal: AbortSignal.timeout(ASK_MS) }, ASK_MS);
    if (reply.ok && base === one.base) one.legs = (await reply.json()).legs;
  } catch {} // the node has gone, or is of an older version: what is known stays
  one.isAsking = false;
}

const shownLegs = (one) => joined(one.earlier, one.legs, one.pause_s ?? null);

/** {stages, changes} as it is kept with the message: who computed the last part, and what happened before. */
function shown(one) {
  const legs = shownLegs(one);
  if (!legs.length && !one.entries.length) return null;
  const drained = Object.values(mesh.document?.peers ?? {}).filter((peer) => peer.draining).map((peer) => peer.name);
  const changes = [...takeovers(legs).map((change) => ({ ...change, handed: change.lost.filter((name) => drained.includes(name)) })), ...one.entries];
  return { stages: (legs.at(-1)?.stages ?? []).map(({ names, layers }) => ({ names, layers })), changes };
}

/** The lines under an answer. */
export function WhoComputed({ work }) {
  if (!work) return null;
  return html`<div class="who-computed">
    ${work.changes.map((one, index) => html`<p class="takeover" key=${index}>${sentence(one, one.handed)}</p>`)}
    ${work.stages.length > 0 && html`<p class="computed-by" aria-label=${t("who.label")}>${work.stages.map(({ names, layers }, index) => html`
      <span key=${index} class="by"><i class="swatch ${stageClass(index)}" aria-hidden="true"></i>${names.join(" + ")} <span class="range">${rangeText(layers)}</span></span>`)}</p>`}
  </div>`;
}
