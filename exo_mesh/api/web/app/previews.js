// The possible placements of a model with their arithmetic, or why there is none; and the options for a placement.
import { bytes, number } from "./format.js";
import { call, mesh } from "./mesh.js";
import { html, useEffect, useState } from "./ui.js";
import { t } from "./strings.js";
import { rangeText, stageClass } from "./who_computed.js";

const POLICIES = ["", "memory", "latency", "throughput"];
const NO_WISH = { policy: "", minPeers: "", context: "", excluded: [], pins: {} };

/** act(body): places the model. The list is fetched again when an option that affects it changes, or a peer joins or
 * leaves. */
export function Place({ model, layers, act, close }) {
  const [wish, setWish] = useState(NO_WISH);
  const [found, setFound] = useState({ ways: null, error: "" });
  const peers = Object.values(mesh.document?.peers ?? {}).sort((one, other) => one.name.localeCompare(other.name));
  const query = new URLSearchParams({ model });
  if (wish.context) query.set("context_limit", wish.context);
  if (wish.excluded.length) query.set("exclude_peers", wish.excluded.join(","));
  const asked = query.toString(), who = peers.map((peer) => peer.id).join(" ");
  useEffect(() => {
    let wanted = true;
    const timer = setTimeout(() => call(`/instance/previews?${asked}`).then(
      ({ previews }) => wanted && setFound({ ways: previews, error: "" }),
      (error) => wanted && setFound({ ways: [], error: error.message })), 250);
    return () => { wanted = false; clearTimeout(timer); };
  }, [asked, who]);
  const set = (name) => (event) => setWish({ ...wish, [name]: event.target.value });
  const exclude = (id) => setWish({ ...wish, excluded: wish.excluded.includes(id) ? wish.excluded.filter((one) => one !== id) : [...wish.excluded, id] });
  const pinned = pinsOf(wish.pins, layers);
  const submit = (event) => { event.preventDefault(); act(bodyOf(model, wish, pinned.pins)); };
  return html`<form class="place" aria-label=${t("place.title", { model })} onSubmit=${submit}>
    <div class="fields">
      <label>${t("place.policy")}<select value=${wish.policy} disabled=${pinned.any} onChange=${set("policy")}>${POLICIES.map((name) => html`<option key=${name} value=${name}>${t(`policy.${name || "auto"}`)}</option>`)}</select></label>
      <label>${t("place.minPeers")}<input type="number" min="1" max=${peers.length} value=${wish.minPeers} disabled=${pinned.any} placeholder="1" onInput=${set("minPeers")} /></label>
      <label>${t("place.context")}<input type="number" min="1" value=${wish.context} placeholder=${t("sampling.default")} onInput=${set("context")} /></label>
    </div>
    <fieldset><legend>${t("place.peers")}</legend><table class="pins"><thead><tr><th>${t("place.use")}</th><th>${t("place.free")}</th><th>${t("place.pin", { n: layers || "?" })}</th></tr></thead>
      <tbody>${peers.map((peer) => html`<tr key=${peer.id}>
        <td><label class="check"><input type="checkbox" checked=${!wish.excluded.includes(peer.id)} onChange=${() => exclude(peer.id)} /> ${peer.name}</label></td>
        <td class="n">${bytes(peer.usable_bytes)}</td>
        <td><input class="pin" inputmode="numeric" placeholder="–" aria-label=${t("place.pinOf", { name: peer.name })} disabled=${wish.excluded.includes(peer.id)} value=${wish.pins[peer.id] ?? ""}
          onInput=${(event) => setWish({ ...wish, pins: { ...wish.pins, [peer.id]: event.target.value } })} /></td></tr>`)}</tbody></table>
      ${pinned.problem && html`<p class="note">${pinned.problem}</p>`}</fieldset>
    <div class="choices"><button type="submit" class="primary" disabled=${Boolean(pinned.problem)}>${t(pinned.any ? "place.byPins" : "place.go")}</button>
      <button type="button" onClick=${close}>${t("sure.no")}</button></div>
    <h3>${t("place.ways")}</h3>
    ${found.error && html`<p class="note" role="alert">${found.error}</p>`}
    ${found.ways === null && html`<p class="quiet">${t("models.working")}</p>`}
    <div class="ways">${(found.ways ?? []).map((way, index) => html`<${Way} key=${index} way=${way} act=${act} />`)}</div>
  </form>`;
}

function Way({ way, act }) {
  if (way.refused) return html`<section class="way refused"><strong>${t("place.width", { n: way.width })}</strong><p>${way.refused.message}</p></section>`;
  return html`<section class="way"><header><strong>${t("place.width", { n: way.width })}</strong>
      <span class="quiet">${way.policies.map((one) => t(`policy.${one}`)).join(", ")} · ${t("models.context", { n: number(way.context_limit) })}</span>
      <button type="button" onClick=${() => act(way.request)}>${t("place.this")}</button></header>
    ${way.note && html`<p class="quiet">${way.note}</p>`}
    <div class="scroll" tabindex="0" role="region" aria-label=${t("place.width", { n: way.width })}><table><thead><tr><th>${t("place.peer")}</th><th>${t("place.layers")}</th><th class="n">${t("place.weights")}</th><th class="n">${t("place.kv")}</th>
      <th class="n">${t("place.overhead")}</th><th class="n">${t("place.left")}</th></tr></thead>
      <tbody>${way.stages.map((stage, turn) => html`<tr key=${stage.peer}><td><i class="swatch ${stageClass(turn)}" aria-hidden="true"></i> ${nameOf(stage)} <span class="quiet">${stage.engine}</span></td><td>${rangeText(stage.layers)}</td>
        <td class="n">${bytes(stage.weights_bytes)}</td><td class="n">${bytes(stage.kv_bytes)}</td><td class="n">${bytes(stage.overhead_bytes)}</td>
        <td class="n">${t("place.leftOf", { left: bytes(stage.headroom_bytes), total: bytes(stage.usable_bytes) })}</td></tr>`)}</tbody></table></div></section>`;
}

function nameOf(stage) {
  const name = (id) => mesh.document?.peers?.[id]?.name ?? id.slice(0, 8);
  return stage.group ? stage.group.peers.map(name).join(" + ") : stage.name || name(stage.peer);
}

/** Converts layers such as "0-13" by peer to the API's half-open ranges. problem: the fault in them; "" if none. */
export function pinsOf(texts, layers) {
  const given = Object.entries(texts).filter(([, text]) => text.trim());
  const pins = {};
  for (const [id, text] of given) {
    const found = text.match(/^\s*(\d{1,5})\s*(?:[-–]\s*(\d{1,5}))?\s*$/);
    const first = found ? Number(found[1]) : 0, last = found ? Number(found[2] ?? found[1]) : -1;
    if (first > last || (layers && last >= layers)) return { any: true, pins, problem: t("place.pinForm", { text: text.slice(0, 20), last: layers - 1 }) };
    pins[id] = [first, last + 1];
  }
  const ranges = Object.values(pins).sort((one, other) => one[0] - other[0]);
  const whole = ranges.every(([start], index) => start === (index ? ranges[index - 1][1] : 0)) && ranges.at(-1)?.[1] === layers;
  return { any: given.length > 0, pins, problem: given.length && layers && !whole ? t("place.pinWhole", { last: layers - 1 }) : "" };
}

function bodyOf(model, wish, pins) {
  const body = { model };
  if (wish.context) body.context_limit = Number(wish.context);
  if (wish.excluded.length) body.exclude_peers = wish.excluded;
  if (Object.keys(pins).length) return { ...body, pins };
  if (wish.policy) body.policy = wish.policy;
  if (wish.minPeers) body.min_peers = Number(wish.minPeers);
  return body;
}
