// Derives from the rings that computed an answer which stages took over, and says it. Pure.
import { number, seconds } from "./format.js";
import { t } from "./strings.js";

export const COLOURS = 8; // stages.css has as many; further stages begin again with the first

/** The class that gives a stage its colour in every view. index: its place in the ring. */
export const stageClass = (index) => `stage-${index % COLOURS}`;

/** A half-open range of layers as people read it: the first and the last layer. */
export const rangeText = ([start, stop]) => (stop - start === 1 ? `${start}` : `${start}–${stop - 1}`);

const sameAs = (one) => (other) => one.peers.join(" ") === other.peers.join(" ");
const isAlike = (one, other) => sameAs(one)(other) && one.layers[0] === other.layers[0] && one.layers[1] === other.layers[1];

/**
 * Joins the legs that a second node tells to those of the node before it. Each node knows only what it read itself, so
 * the same ring may come twice. pause_s: from the last text of the one node to the first of the other.
 */
export function joined(before, after, pause_s) {
  if (!before.length || !after.length) return before.length ? before : after;
  const last = before.at(-1), [first, ...rest] = after;
  if (first.stages.length === last.stages.length && first.stages.every((one, at) => isAlike(one, last.stages[at]))) return [...before, ...rest];
  const stages = first.stages.map((one) => ({ ...one, is_new: !last.stages.some((other) => isAlike(one, other)) }));
  return [...before, { ...first, stages, pause_s }, ...rest];
}

/** The parts of one range that another one does not have. */
function without([start, stop], other) {
  if (!other) return [[start, stop]];
  return [[start, Math.min(stop, other[0])], [Math.max(start, other[1]), stop]].filter(([from, to]) => from < to);
}

/** What changed from each leg to the next: {lost, took, restarted, pause_s}. lost: names; the others: {name, layers}. */
export function takeovers(legs) {
  return legs.slice(1).map((leg, at) => changeOf(legs[at].stages, leg)).filter(({ lost, took, restarted }) => lost.length + took.length + restarted.length > 0);
}

function changeOf(before, { stages, pause_s }) {
  const holds = new Set(stages.flatMap((one) => one.peers));
  const lost = before.flatMap((one) => one.names.filter((_, at) => !holds.has(one.peers[at])));
  const took = [], restarted = [];
  for (const one of stages.filter(({ is_new }) => is_new)) {
    const own = before.find(sameAs(one)), name = one.names.join(" + ");
    if (own && isAlike(own, one)) restarted.push({ name, layers: one.layers });
    else for (const layers of without(one.layers, own?.layers)) took.push({ name, layers });
  }
  return { lost: [...new Set(lost)], took, restarted, pause_s };
}

/** One change as a sentence. handed: the names of peers that give their layers away because they are drained. */
export function sentence({ lost, took, restarted, pause_s, entry }, handed = []) {
  const time = pause_s === null || pause_s === undefined ? "" : t("who.after", { time: pause_s < 1 ? seconds(pause_s) : `${number(pause_s, 1)} s` });
  if (entry) return t("who.entry", { name: entry.left, next: entry.next }) + time;
  const list = took.map(({ name, layers }) => t("who.took", { name, n: layers[1] - layers[0], layers: rangeText(layers) }));
  const again = restarted.map(({ name, layers }) => t("who.restarted", { name, n: layers[1] - layers[0], layers: rangeText(layers) }));
  const names = lost.join(", "), what = [...list, ...again].join(", ");
  if (!lost.length) return what + time;
  const verb = lost.every((name) => handed.includes(name)) ? "who.handed" : "who.stopped";
  return what ? `${t(verb, { names })}; ${what}${time}` : t(verb, { names }) + time;
}
