// Draws the mesh: members on a ring; members with layers are linked in the order of the stages. Uses no browser API.
import { bytes, number } from "./format.js";
import { hopOf, layoutOf, membersOf } from "./ring_layout.js";
import { html } from "./ui.js";
import { t } from "./strings.js";

const BARS = [0, 2, 10, 40]; // frames/s above which the dashes of the hops move faster

/** rate: {tokens, frames} per second of the instance. point(id, place): called when a peer is pointed at or focused;
 * point("") when that ends. */
export function Ring({ document: live, instance, rate, isNarrow, isRecovering, chosen, choose, point }) {
  const members = membersOf(live, instance);
  const { width, height, radius, centre, places } = layoutOf(members, isNarrow);
  const staged = members.map(({ stage }, index) => [stage, index]).filter(([stage]) => stage);
  const hops = staged.length > 1 ? staged.map(([, index], turn) => [index, staged[(turn + 1) % staged.length][1]]) : [];
  const flow = rate.frames > 0 ? BARS.filter((bar) => rate.frames > bar).length : 0;
  // The text of a hop is outside of a small ring and inside of a large one. It is also inside at the bottom of a wide
  // ring, because peers without layers follow below.
  const isOutside = (from, to) => (isNarrow || staged.length === 2 ? Math.abs(to.x - from.x) > Math.abs(to.y - from.y) / 2 : staged.length <= 4 && to.x - from.x > -Math.abs(to.y - from.y));
  const at = (place) => ({ x: place.x / width, y: place.y / height });
  return html`<svg class="ring ${isRecovering ? "recovering" : ""}" viewBox="0 0 ${width} ${height}" role="group" aria-label=${t("ring.label", { n: Object.keys(live.peers).length })}>
    <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" /></marker></defs>
    ${members.map((member, index) => member.isGroup && html`<${GroupMark} key=${`group ${member.key}`} member=${member} place=${places[index]} radius=${radius} isNarrow=${isNarrow} />`)}
    ${hops.map(([from, to]) => html`<${Hop} key=${`${members[from].key} ${members[to].key}`} from=${places[from]} to=${places[to]} isPair=${staged.length === 2} isOutside=${isOutside(places[from], places[to])}
      flow=${flow} link=${linkOf(live.links, members[from].ids[0], members[to].ids[0])} />`)}
    ${members.map((member, index) => member.ids.map((id, seat) => html`<${PeerMark} key=${id} rank=${seat} peer=${live.peers[id] ?? nameOnly(live, id)} at=${places[index].seats[seat]}
      radius=${radius} words=${places[index].words} isNarrow=${isNarrow} isGrouped=${member.isGroup} stage=${member.stage} level=${levelOf(live.health, id)} isLost=${!(id in live.peers)}
      isChosen=${id === chosen} choose=${choose} point=${(shown) => point(shown, at(places[index].seats[seat]))} />`))}
    ${instance && centre && html`<text class="middle" x=${centre.x} y=${centre.y - 8}>${short(instance.model, 26)}
      <tspan x=${centre.x} dy="20">${stateOf(instance, rate, isRecovering)}</tspan></text>`}
  </svg>`;
}

export function stateOf(instance, rate, isRecovering) {
  if (isRecovering) return t("instance.recovering");
  if (instance.state !== "ready" || !rate.tokens) return t(`instance.${instance.state}`);
  return t("ring.rate", { n: number(rate.tokens, 1) });
}

export function levelOf(health, id) {
  return health?.peer_health?.find((peer) => peer.id === id)?.level ?? "ok";
}

function nameOnly(live, id) {
  const known = live.health?.peer_health?.find((peer) => peer.id === id);
  return { id, name: known?.name ?? id.slice(0, 8), asleep: known?.reasons?.some((reason) => reason.code === "asleep") };
}

function linkOf(links = {}, from, to) {
  return links[`${from} ${to}`] ?? links[`${to} ${from}`];
}

function short(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

const whole = (value) => Math.round(10 * value) / 10;
const rangeOf = ({ layers }) => (layers[1] - layers[0] === 1 ? `${layers[0]}` : `${layers[0]}–${layers[1] - 1}`);

/** The frame around the peers of a tensor group, which together are one member of the ring. */
function GroupMark({ member, place, radius, isNarrow }) {
  const { x, y, halfWidth, halfHeight } = place;
  const text = t(isNarrow ? "ring.groupShort" : "ring.group", { n: member.ids.length, layers: rangeOf(member.stage) });
  const shown = member.stage.group?.backend ? `${text} · ${member.stage.group.backend}` : text;
  return html`<g class="group"><rect x=${whole(x - halfWidth)} y=${whole(y - halfHeight)} width=${whole(2 * halfWidth)} height=${whole(2 * halfHeight)} rx=${radius + 10} />
    <text class="unit" x=${whole(x)} y=${whole(place.title)}>${shown}</text></g>`;
}

/** An arc from one member to the next, bent so that both directions between two members are visible. */
function Hop({ from, to, isPair, isOutside, flow, link }) {
  const { start, control, end, middle, normal } = hopOf(from, to, isPair);
  const away = (isOutside ? 1 : -1) * (6 + 30 * Math.abs(normal.x) + 14 * Math.abs(normal.y));
  const words = { x: middle.x + normal.x * away, y: middle.y + normal.y * away };
  const figures = [link?.rtt_ms && `${number(link.rtt_ms, 1)} ms`, link?.mb_per_s && `${number(link.mb_per_s)} MB/s`].filter(Boolean);
  return html`<g class="hop ${flow ? `flowing flow-${flow}` : ""}">
    <path d="M${whole(start.x)} ${whole(start.y)} Q${whole(control.x)} ${whole(control.y)} ${whole(end.x)} ${whole(end.y)}" marker-end="url(#arrow)" />
    ${figures.length > 0 && html`<text x=${whole(words.x)} y=${whole(words.y)}>${figures[0]}
      ${figures[1] && html`<tspan x=${whole(words.x)} dy="13">${figures[1]}</tspan>`}</text>`}
  </g>`;
}

/** A peer: a circle that fills with its used memory, its layers inside, its name and figures above or below. */
function PeerMark({ peer, rank, at, radius, words, isNarrow, isGrouped, stage, level, isLost, isChosen, choose, point }) {
  const round = 2 * Math.PI * radius, used = usedOf(peer), models = Math.min(used, peer.total_bytes ? peer.reserved_bytes / peer.total_bytes : 0);
  const layers = stage && !isGrouped ? rangeOf(stage) : "";
  const held = isLost ? t(peer.asleep ? "ring.asleep" : "ring.lost") : isGrouped ? t("ring.rank") : layers ? t("ring.layersShort") : peer.draining ? t("ring.draining") : peer.role === "api" ? t("ring.api") : t("ring.idle");
  const name = short(peer.name, isNarrow ? 11 : isGrouped && (words === "above" || words === "below") ? 12 : 19);
  const lines = isLost ? [] : [`${stage?.engine ?? peer.devices?.[0]?.engine ?? ""} · ${bytes(peer.total_bytes)}`, figuresOf(peer, isNarrow || isGrouped)].filter(Boolean);
  const shown = layers || (isGrouped ? rank : "–");
  // The label begins with the visible text in its order, so that users of voice control can say what they see.
  const label = `${shown} ${held} ${name} ${lines.join(" ")}, ${isLost ? "" : `${peer.total_bytes ? t("ring.free", { bytes: bytes(peer.usable_bytes) }) : t("mesh.memoryUnknown")}, `}${t(`level.${level}`)}`;
  const pressed = (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(peer.id); }
    if (event.key === "Escape") point("");
  };
  const radiusOut = radius + (isGrouped ? 14 : 0);
  const top = { above: -radiusOut - 10 - 15 * lines.length, below: radiusOut + 20, left: 4 - 7.5 * lines.length, right: 4 - 7.5 * lines.length }[words];
  const side = { left: -radiusOut - 9, right: radiusOut + 9 }[words] ?? 0;
  const classes = ["peer", `level-${level}`, stage && "holds", isChosen && "chosen", isLost && "lost", `words-${words}`, peer.draining && "draining"].filter(Boolean).join(" ");
  return html`<g class=${classes} transform="translate(${whole(at.x)} ${whole(at.y)})" role="button" tabindex="0" aria-pressed=${isChosen ? "true" : "false"} aria-label=${label}
      onClick=${() => choose(peer.id)} onKeyDown=${pressed} onPointerEnter=${() => point(peer.id)} onPointerLeave=${() => point("")} onFocus=${() => point(peer.id)} onBlur=${() => point("")}>
    <circle class="body" r=${radius} />
    <circle class="gauge" r=${radius} stroke-dasharray="${whole(round * used)} ${whole(round)}" transform="rotate(-90)" />
    ${models > 0 && html`<circle class="gauge models" r=${radius} stroke-dasharray="${whole(round * models)} ${whole(round)}" transform="rotate(-90)" />`}
    <text class="layers" y="-1">${shown}</text>${" "}
    <text class="unit" y="14">${short(held, 10)}</text>${" "}
    <text class="name" x=${side} y=${top}>${name}</text>${" "}
    ${lines.map((line, index) => html`<text class="unit" x=${side} y=${top + 15 * (index + 1)}>${line}</text>${" "}`)}
    ${level !== "ok" && html`<g class="badge" transform="translate(${whole(0.74 * radius)} ${whole(-0.74 * radius)})"><circle r="9" /><path d="M0 -4.5v5M0 4v.5" /></g>`}
  </g>`;
}

export function usedOf(peer) {
  return peer.total_bytes ? Math.max(0, Math.min(1, 1 - peer.usable_bytes / peer.total_bytes)) : 0;
}

/** The load, temperature and power of a peer; unknown values are left out. */
export function figuresOf(peer, isShort = false) {
  const found = isShort ? [] : [t("ring.load", { n: number(peer.load, 1) })];
  if (peer.temperature_c) found.push(`${number(peer.temperature_c)} °C`);
  if (peer.power_w) found.push(`${number(peer.power_w)} W`);
  return found.join(" · ");
}
