// The mesh as a picture: peers on a ring, those that hold layers joined in the order of the stages.
import { bytes, number } from "./format.js";
import { html } from "./ui.js";
import { t } from "./strings.js";

const RADIUS = 38;
const narrow = matchMedia("(max-width: 720px)");
/** The picture is scaled to its place: a phone gets a smaller one, so that its words stay readable. */
const sizeOf = () => (narrow.matches ? { width: 380, across: 118 } : { width: 640, across: 215 });
/** Two peers stand side by side and need less room than a ring. */
const heightOf = (peers) => (peers < 3 ? 230 : 400);

/** Peers of an instance first, in the order of its stages; then the others. */
export function ringOrder(peers, instance) {
  const staged = (instance?.stages ?? []).flatMap((stage) => stage.group?.peers ?? [stage.peer]);
  const rest = Object.keys(peers).filter((id) => !staged.includes(id)).sort();
  return [...new Set(staged.filter((id) => peers[id])), ...rest];
}

/** A place for each peer; two stand side by side, more on an ellipse that begins at the top. */
export function places(ids) {
  const found = {};
  const { width, across } = sizeOf();
  ids.forEach((id, index) => {
    const turn = (2 * Math.PI * index) / ids.length - (ids.length === 2 ? Math.PI : Math.PI / 2);
    const wide = ids.length === 1 ? 0 : 1;
    found[id] = { x: width / 2 + wide * across * Math.cos(turn), y: heightOf(ids.length) / 2 - 14 + wide * 125 * Math.sin(turn) };
  });
  return found;
}

export function Ring({ document: live, instance, rate, chosen, choose }) {
  const ids = ringOrder(live.peers, instance);
  const at = places(ids);
  const stages = (instance?.stages ?? []).filter((stage) => at[leader(stage)]);
  const height = heightOf(ids.length);
  const { width } = sizeOf();
  const hops = stages.length > 1 ? stages.map((stage, index) => [leader(stage), leader(stages[(index + 1) % stages.length])]) : [];
  return html`<svg class="ring" viewBox="0 0 ${width} ${height}" role="group" aria-label=${t("ring.label", { n: ids.length })}>
    <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" /></marker></defs>
    ${hops.map(([from, to], index) => html`<${Hop} key=${`${from} ${to} ${index}`} from=${at[from]} to=${at[to]} isFlowing=${rate > 0} link=${linkOf(live.links, from, to)} />`)}
    ${ids.map((id) => html`<${PeerMark} key=${id} peer=${live.peers[id]} at=${at[id]} stages=${stages.filter((stage) => holds(stage, id))}
      level=${levelOf(live.health, id)} isChosen=${id === chosen} choose=${choose} />`)}
    ${instance && ids.length > 2 && html`<text class="middle" x=${width / 2} y=${height / 2 - 18}>${short(instance.model, 22)}
      <tspan x=${width / 2} dy="20">${rate > 0 ? t("ring.rate", { n: number(rate, 1) }) : t(`instance.${instance.state}`)}</tspan></text>`}
  </svg>`;
}

const leader = (stage) => stage.group?.peers?.[0] ?? stage.peer;
const holds = (stage, id) => (stage.group?.peers ?? [stage.peer]).includes(id);

export function levelOf(health, id) {
  return health?.peer_health?.find((peer) => peer.id === id)?.level ?? "ok";
}

function linkOf(links = {}, from, to) {
  return links[`${from} ${to}`] ?? links[`${to} ${from}`];
}

function short(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** An arc from one mark to the next, bent to its left so that both ways between two peers can be seen. */
function Hop({ from, to, isFlowing, link }) {
  const dx = to.x - from.x, dy = to.y - from.y, length = Math.hypot(dx, dy) || 1;
  const bend = 46, mx = (from.x + to.x) / 2 + (dy / length) * bend, my = (from.y + to.y) / 2 - (dx / length) * bend;
  const edge = (end) => {
    const ex = mx - end.x, ey = my - end.y, reach = Math.hypot(ex, ey) || 1;
    return `${end.x + (ex / reach) * (RADIUS + 6)} ${end.y + (ey / reach) * (RADIUS + 6)}`;
  };
  const label = link?.rtt_ms === undefined ? "" : `${number(link.rtt_ms, 1)} ms`;
  return html`<g class="hop ${isFlowing ? "flowing" : ""}">
    <path d="M${edge(from)} Q${mx} ${my} ${edge(to)}" marker-end="url(#arrow)" />
    ${label && html`<text x=${(from.x + to.x) / 2 + (dy / length) * (bend / 2 + 24)} y=${(from.y + to.y) / 2 - (dx / length) * (bend / 2 + 24) + 4}>${label}</text>`}
  </g>`;
}

/** A peer: a ring that fills with its used memory, its name below, its layers inside. */
function PeerMark({ peer, at, stages, level, isChosen, choose }) {
  const round = 2 * Math.PI * RADIUS;
  const used = peer.total_bytes ? Math.min(1, 1 - peer.usable_bytes / peer.total_bytes) : 0;
  const layers = stages.map((stage) => `${stage.layers[0]}–${stage.layers[1] - 1}`).join(", ");
  const held = layers ? t("ring.layersShort") : t("ring.idle");
  const name = short(peer.name, 20), kind = `${peer.devices?.[0]?.engine ?? ""} · ${bytes(peer.total_bytes)}`;
  // The words of the picture come first and in its order, so that voice control finds what it sees.
  const label = `${layers || "–"} ${held} ${name} ${kind}, ${t("ring.free", { bytes: bytes(peer.usable_bytes) })}, ${t(`level.${level}`)}`;
  const pressed = (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(peer.id); }
  };
  return html`<g class="peer level-${level} ${stages.length ? "holds" : ""} ${isChosen ? "chosen" : ""}" transform="translate(${at.x} ${at.y})"
      role="button" tabindex="0" aria-pressed=${isChosen} aria-label=${label} onClick=${() => choose(peer.id)} onKeyDown=${pressed}>
    <circle class="body" r=${RADIUS} />
    <circle class="gauge" r=${RADIUS} stroke-dasharray="${round * used} ${round}" transform="rotate(-90)" />
    <text class="layers" y="-1">${layers || "–"}</text>${" "}
    <text class="unit" y="14">${held}</text>${" "}
    <text class="name" y=${RADIUS + 20}>${name}</text>${" "}
    <text class="unit" y=${RADIUS + 36}>${kind}</text>
    ${level !== "ok" && html`<circle class="badge" cx="28" cy="-28" r="8" />`}
  </g>`;
}
