// The lines of the picture of the mesh: links between peers, hops between stages, and the token that goes round.
import { number } from "./format.js";
import { hopOf } from "./ring_layout.js";
import { html } from "./ui.js";

const MOST_PAIRS = 6; // of more peers without a model, only neighbours in the picture are joined
const LAPS_S = [0, 3.2, 1.8, 1, 0.6]; // one round of the dot, by how fast frames flow

const whole = (value) => Math.round(10 * value) / 10;

/** The width of a line: more for a faster link, by a step for each factor of ten; thin where nothing was measured. */
export function widthOf(link) {
  return link?.mb_per_s > 0 ? whole(Math.max(1.5, Math.min(7, 1.5 + 1.4 * Math.log10(link.mb_per_s / 5)))) : 1.2;
}

export function linkOf(links = {}, from, to) {
  return links[`${from} ${to}`] ?? links[`${to} ${from}`];
}

/** The pairs of members between which a plain line is drawn. Without a model: all pairs of a small mesh, and neighbours
 * of a large one. Else: each peer that holds no layers with the nearest member in the picture. */
export function plainPairs(members, places) {
  const staged = members.map(({ stage }, index) => (stage ? index : -1)).filter((index) => index >= 0);
  const alive = members.map(({ isLost }, index) => (isLost ? -1 : index)).filter((index) => index >= 0);
  if (!staged.length) {
    const isNear = (one, other) => members.length <= MOST_PAIRS || other - one === 1 || other - one === members.length - 1;
    return alive.flatMap((one) => alive.filter((other) => other > one && isNear(one, other)).map((other) => [one, other]));
  }
  const apart = (one, other) => Math.hypot(places[one].x - places[other].x, places[one].y - places[other].y);
  const nearest = (index) => staged.filter((other) => !members[other].isLost).sort((one, other) => apart(index, one) - apart(index, other))[0];
  const pairs = alive.filter((index) => !members[index].stage).map((index) => [index, nearest(index)]);
  return pairs.filter(([, other]) => other !== undefined);
}

/** A plain link between two members. */
export function Line({ from, to, link }) {
  const words = figuresOf(link).join(", ");
  return html`<path class="link ${link ? "" : "unmeasured"}" stroke-width=${widthOf(link)} d="M${whole(from.x)} ${whole(from.y)} L${whole(to.x)} ${whole(to.y)}"><title>${words || "–"}</title></path>`;
}

function figuresOf(link) {
  return [link?.rtt_ms && `${number(link.rtt_ms, 1)} ms`, link?.mb_per_s && `${number(link.mb_per_s)} MB/s`].filter(Boolean);
}

/** An arc from one member to the next, bent so that both directions between two members are visible. */
export function Hop({ from, to, isPair, isOutside, flow, link }) {
  const { middle, normal } = hopOf(from, to, isPair);
  const away = (isOutside ? 1 : -1) * (8 + 38 * Math.abs(normal.x) + 18 * Math.abs(normal.y));
  const words = { x: middle.x + normal.x * away, y: middle.y + normal.y * away };
  const figures = figuresOf(link);
  return html`<g class="hop ${flow ? `flowing flow-${flow}` : ""}">
    <path d=${arc(from, to, isPair)} style=${{ strokeWidth: widthOf(link) }} marker-end="url(#arrow)" />
    ${figures.length > 0 && html`<text x=${whole(words.x)} y=${whole(words.y)}>${figures[0]}
      ${figures[1] && html`<tspan x=${whole(words.x)} dy="14">${figures[1]}</tspan>`}</text>`}
  </g>`;
}

function arc(from, to, isPair) {
  const { start, control, end } = hopOf(from, to, isPair);
  return `M${whole(start.x)} ${whole(start.y)} Q${whole(control.x)} ${whole(control.y)} ${whole(end.x)} ${whole(end.y)}`;
}

/** The token that goes round while frames flow: over all hops, or round the only member. It passes below the peers. */
export function Token({ places, hops, flow, isPair }) {
  if (!flow) return null;
  const only = places[0], round = only.radii[0] + 7;
  const path = hops.length
    ? hops.map(([from, to], turn) => (turn ? arc(places[from], places[to], isPair).replace("M", "L") : arc(places[from], places[to], isPair))).join(" ")
    : `M${whole(only.x)} ${whole(only.y - round)} A${round} ${round} 0 1 1 ${whole(only.x - 0.1)} ${whole(only.y - round)}`;
  const lap = LAPS_S[flow], dots = flow > 2 && hops.length ? 2 : 1;
  return html`${Array.from({ length: dots }, (_, dot) => html`<circle key=${dot} class="token" r="7"
    style=${{ offsetPath: `path("${path}")`, animationDuration: `${lap}s`, animationDelay: `${-(dot * lap) / dots}s` }} />`)}`;
}
