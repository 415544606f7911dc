// Draws the mesh: members on a ring; members with layers are linked in the order of the stages. Uses no browser API.
import { bytes, number, percent } from "./format.js";
import { layoutOf, membersOf } from "./ring_layout.js";
import { Hop, Line, Token, linkOf, plainPairs } from "./ring_links.js";
import { html } from "./ui.js";
import { t } from "./strings.js";
import { isServed } from "./served.js";
import { rangeText, stageClass } from "./who_computed.js";

const BARS = [0, 2, 10, 40]; // frames/s above which the dashes of the hops move faster
const INSIDE = 8; // between the rim, which shows the layers, and the ring inside it, which shows the memory

/** rate: {tokens, frames} per second of the instance. point(id, place): called when a peer is pointed at or focused;
 * point("") when that ends. isSmall: without figures, for other views. */
export function Ring({ document: live, instance, rate, isNarrow, isRecovering, isSmall = false, chosen, choose, point }) {
  const members = membersOf(live, instance);
  const { width, height, radius, centre, places } = layoutOf(members, isNarrow);
  const staged = members.map(({ stage }, index) => [stage, index]).filter(([stage]) => stage);
  const hops = staged.length > 1 ? staged.map(([, index], turn) => [index, staged[(turn + 1) % staged.length][1]]) : [];
  const flow = rate.frames > 0 && staged.length ? BARS.filter((bar) => rate.frames > bar).length : 0;
  const isPair = staged.length === 2, isFromServer = isServed(live, instance);
  const total = isFromServer ? 0 : Math.max(0, ...staged.map(([stage]) => stage.layers[1]));
  // The text of a hop is outside of a small ring and inside of a large one. It is also inside at the bottom of a wide
  // ring, because peers without layers follow below.
  const isOutside = (from, to) => (isNarrow || isPair ? Math.abs(to.x - from.x) > Math.abs(to.y - from.y) / 2 : staged.length <= 4 && to.x - from.x > -Math.abs(to.y - from.y));
  const at = (place) => ({ x: place.x / width, y: place.y / height });
  const linkBetween = (from, to) => linkOf(live.links, members[from].ids[0], members[to].ids[0]);
  return html`<svg class=${["ring", isRecovering && "recovering", isSmall && "small"].filter(Boolean).join(" ")} viewBox="0 0 ${width} ${height}" ...${isSmall ? { "aria-hidden": "true" } : { role: "group", "aria-label": t("ring.label", { n: Object.keys(live.peers).length }) }}>
    <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerUnits="userSpaceOnUse" markerWidth="13" markerHeight="13" orient="auto"><path d="M0 0 8 4 0 8z" /></marker></defs>
    ${plainPairs(members, places).map(([from, to]) => html`<${Line} key=${`${members[from].key} - ${members[to].key}`} from=${places[from]} to=${places[to]} link=${linkBetween(from, to)} />`)}
    ${members.map((member, index) => member.isGroup && html`<${GroupMark} key=${`group ${member.key}`} member=${member} place=${places[index]} radius=${radius} isNarrow=${isNarrow} />`)}
    ${hops.map(([from, to]) => html`<${Hop} key=${`${members[from].key} ${members[to].key}`} from=${places[from]} to=${places[to]} isPair=${isPair} isOutside=${isOutside(places[from], places[to])}
      flow=${flow} link=${linkBetween(from, to)} />`)}
    <${Token} places=${places} hops=${hops} flow=${flow} isPair=${isPair} />
    ${members.map((member, index) => member.ids.map((id, seat) => html`<${PeerMark} key=${id} rank=${seat} peer=${live.peers[id] ?? nameOnly(live, id)} at=${places[index].seats[seat]}
      radius=${places[index].radii[seat]} words=${places[index].words} isNarrow=${isNarrow} isGrouped=${member.isGroup} stage=${member.stage} turn=${member.turn} total=${total} fetched=${fetchedBy(live, instance, id)}
      isSmall=${isSmall} level=${levelOf(live.health, id)} isLost=${!(id in live.peers)} isChosen=${id === chosen} choose=${choose} point=${(shown) => point(shown, at(places[index].seats[seat]))} />`))}
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

/** How much of its running downloads a peer has; null without any. */
function fetchedBy(live, instance, id) {
  const staged = (instance?.stages ?? []).flatMap((stage) => stage.downloads ?? []);
  const mine = [...Object.values(live.downloads ?? {}), ...staged].filter((one) => one.peer === id && (one.state === "ongoing" || one.state === "pending"));
  if (!mine.length) return null;
  const sum = (name) => mine.reduce((all, one) => all + (one[name] ?? 0), 0);
  return sum("total_bytes") ? Math.min(1, sum("done_bytes") / sum("total_bytes")) : 0;
}

function nameOnly(live, id) {
  const known = live.health?.peer_health?.find((peer) => peer.id === id);
  return { id, name: known?.name ?? id.slice(0, 8), asleep: known?.reasons?.some((reason) => reason.code === "asleep") };
}

function short(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

const whole = (value) => Math.round(10 * value) / 10;

/** The frame around the peers of a tensor group, which together are one member of the ring. */
function GroupMark({ member, place, radius, isNarrow }) {
  const { x, y, halfWidth, halfHeight } = place;
  const text = t(isNarrow ? "ring.groupShort" : "ring.group", { n: member.ids.length, layers: rangeText(member.stage.layers) });
  const shown = member.stage.group?.backend ? `${text} · ${member.stage.group.backend}` : text;
  return html`<g class="group ${stageClass(member.turn)}"><rect x=${whole(x - halfWidth)} y=${whole(y - halfHeight)} width=${whole(2 * halfWidth)} height=${whole(2 * halfHeight)} rx=${radius + 10} />
    <text class="unit" x=${whole(x)} y=${whole(place.title)}>${shown}</text></g>`;
}

/** An arc of a circle: from the share `start` of it to the share `stop`, clockwise from the top. */
function Arc({ r, start, stop, kind }) {
  const round = 2 * Math.PI * r;
  return html`<circle class=${kind} r=${whole(r)} stroke-dasharray="${whole(round * (stop - start))} ${whole(round)}" stroke-dashoffset=${whole(-round * start)} transform="rotate(-90)" />`;
}

/** What stands inside and beside a peer. */
function textsOf({ peer, rank, isNarrow, isGrouped, stage, total, isLost, fetched, words }) {
  const layers = stage && !isGrouped && total ? rangeText(stage.layers) : "";
  const held = stage && !total ? t("ring.server") : isLost ? t(peer.asleep ? "ring.asleep" : "ring.lost") : isGrouped ? t("ring.rank") : layers ? t("ring.layersShort") : peer.draining ? t("ring.draining") : peer.role === "api" ? t("ring.api") : t("ring.idle");
  const name = short(peer.name, isNarrow ? 11 : isGrouped && (words === "above" || words === "below") ? 12 : 19);
  const engine = stage?.engine ?? peer.devices?.[0]?.engine;
  const kind = [engine && short(engine, 12), peer.total_bytes && bytes(peer.total_bytes)].filter(Boolean).join(" · ");
  const second = fetched === null ? figuresOf(peer, isNarrow || isGrouped) : t("ring.fetching", { share: percent(fetched) });
  return { shown: layers || (isGrouped ? rank : stage ? "⇄" : "–"), held, name, lines: isLost ? [] : [kind, second].filter(Boolean) };
}

/** A peer: a circle with the size of its memory. The rim has its layers of the model, in the colour of its stage; the
 * ring inside shows how much of its memory is in use. Its name and figures are above, below or beside it. */
function PeerMark(props) {
  const { peer, at, radius, words, isGrouped, isSmall, stage, turn, total, fetched, level, isLost, isChosen, choose, point } = props;
  const used = usedOf(peer), models = Math.min(used, peer.total_bytes ? peer.reserved_bytes / peer.total_bytes : 0);
  const { shown, held, name, lines } = textsOf(props);
  // The label begins with the visible text in its order, so that users of voice control can say what they see.
  const label = `${shown} ${held} ${name} ${lines.join(" ")}, ${isLost ? "" : `${peer.total_bytes ? t("ring.free", { bytes: bytes(peer.usable_bytes) }) : t("mesh.memoryUnknown")}, `}${t(`level.${level}`)}`;
  const pressed = (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(peer.id); }
    if (event.key === "Escape") point("");
  };
  const radiusOut = radius + (isGrouped ? 14 : fetched === null ? 0 : 6);
  const top = { above: -radiusOut - 11 - 16 * lines.length, below: radiusOut + 20, left: 4 - 8 * lines.length, right: 4 - 8 * lines.length }[words];
  const side = { left: -radiusOut - 9, right: radiusOut + 9 }[words] ?? 0;
  const classes = ["peer", `level-${level}`, stage && "holds", stage && stageClass(turn), isChosen && "chosen", isLost && "lost", `words-${words}`, peer.draining && "draining"].filter(Boolean).join(" ");
  const acts = isSmall ? {} : {
    role: "button", tabindex: "0", "aria-pressed": isChosen ? "true" : "false", "aria-label": label, onClick: () => choose(peer.id), onKeyDown: pressed,
    onPointerEnter: () => point(peer.id), onPointerLeave: () => point(""), onFocus: () => point(peer.id), onBlur: () => point(""),
  };
  return html`<g class=${classes} transform="translate(${whole(at.x)} ${whole(at.y)})" ...${acts}>
    <circle class="body" r=${radius} />
    ${stage && total > 0 && html`<${Arc} kind="rim" r=${radius} start=${stage.layers[0] / total} stop=${stage.layers[1] / total} />`}
    <${Arc} kind="gauge" r=${radius - INSIDE} start=${models} stop=${used} />
    ${models > 0 && html`<${Arc} kind="gauge models" r=${radius - INSIDE} start=${0} stop=${models} />`}
    ${fetched !== null && html`<${Arc} kind="fetched" r=${radius + 6} start=${0} stop=${Math.max(0.01, fetched)} />`}
    <text class="layers" y="-1" style=${{ fontSize: `${whole(Math.max(11, Math.min(18, 0.42 * radius)))}px` }}>${shown}</text>${" "}
    <text class="unit inside" y="13" style=${{ fontSize: `${whole(Math.max(9, Math.min(11.5, 0.28 * radius)))}px` }}>${short(held, 10)}</text>${" "}
    <text class="name" x=${side} y=${top}>${name}</text>${" "}
    ${lines.map((line, index) => html`<text class="unit" x=${side} y=${top + 16 * (index + 1)}>${line}</text>${" "}`)}
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
