// Who computed an answer, and who took over: asked of the entry peer while the answer runs, shown under the answer.
import { fetchAt, mesh, nameOf } from "./mesh.js";
import { html } from "./ui.js";
import { t } from "./strings.js";
import { joined, rangeText, sentence, stageClass, takeovers } from "./who_computed.js";

const ASK_MS = 2000; // an answer does not wait longer for this
const kept = new Map(); // request id → what is known of a running answer

/** What is known of who computes a running answer; asks its node again when the rings of the mesh have changed.
 * changed(): called when more is known. */
export function workOf(requestId, answer, changed) {
  const one = kept.get(requestId) ?? { base: answer.base, earlier: [], legs: [], entries: [], document: null, rings: "", length: 0, grewAt: 0, pause_s: null, asking: null };
  kept.set(requestId, one);
  const length = answer.text.length + answer.reasoning.length, now = Date.now();
  if (length > one.length) {
    if (one.base !== answer.base) passOn(one, answer.base, now);
    Object.assign(one, { length, grewAt: now });
    if (hasChanged(one)) ask(requestId, one).then(changed);
  }
  return shown(one);
}

/** What is known at the end of an answer; forgets the request. isStopped: the reader does not wait for more. */
export async function finalWork(requestId, isStopped) {
  const one = kept.get(requestId);
  if (!one) return null;
  kept.delete(requestId);
  await one.asking;
  if (!isStopped) await ask(requestId, one);
  return shown(one);
}

/** The answer has grown at another node for the first time: its legs come after those of the node before. */
function passOn(one, base, now) {
  const pause_s = one.grewAt ? (now - one.grewAt) / 1000 : null;
  if (one.grewAt) one.entries.push({ lost: [], took: [], restarted: [], pause_s, entry: { left: nameOf(one.base), next: nameOf(base) } });
  Object.assign(one, { base, earlier: shownLegs(one), legs: [], pause_s, rings: "" });
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

function ask(requestId, one) {
  const { base } = one;
  one.asking ??= fetchAt(base, `/v1/requests/${encodeURIComponent(requestId)}/stages`, { signal: AbortSignal.timeout(ASK_MS) }, ASK_MS)
    .then(async (reply) => { if (reply.ok && base === one.base) one.legs = (await reply.json()).legs; })
    .catch(() => {}) // the node has gone, or is of an older version: what is known stays
    .finally(() => { one.asking = null; });
  return one.asking;
}

const shownLegs = (one) => joined(one.earlier, one.legs, one.pause_s);

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
    ${work.stages.length > 0 && html`<p class="computed-by" aria-label=${t("who.label")}><${Stages} stages=${work.stages} /></p>`}
  </div>`;
}

/** The stages of a ring, each in its colour. */
export function Stages({ stages }) {
  return stages.map(({ names, layers }, index) => html`
    <span key=${index} class="by"><i class="swatch ${stageClass(index)}" aria-hidden="true"></i>${names.join(" + ")} <span class="range">${rangeText(layers)}</span></span>`);
}
