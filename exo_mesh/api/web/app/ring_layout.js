// Computes the places of the members in the picture of the mesh. Numbers only: no drawing, no browser API.

const STEPS = 720; // steps of the sum that measures an ellipse
const GAP = 14; // between the peers of a tensor group, and around them
const WORDS = 50; // height of a peer's text
const LINE = 130; // height of a row: a peer, and the text of the hop to the next peer

const LEAST = 0.72; // radius of a peer with hardly any memory, as a share of that of the largest peer

/** A phone gets a narrow picture, so that its text stays readable. words: room for the text beside a peer. */
const SHAPES = {
  wide: { width: 640, words: 158, perRow: 4 },
  narrow: { width: 440, words: 116, perRow: 3 },
};

/**
 * The members: first the stages in the order of the ring, each a peer or a tensor group; then peers without layers, and
 * lost peers. {key, ids, stage, turn, isGroup, isLost, sizes}. turn: the place of the stage in the ring, which gives its
 * colour. sizes: the memory of each peer, as a share of the largest.
 */
export function membersOf(live, instance) {
  const peers = live.peers ?? {};
  const lost = (live.health?.peer_health ?? []).filter((one) => !(one.id in peers));
  const known = (id) => id in peers || lost.some((one) => one.id === id);
  const seen = new Set(), members = [];
  const most = Math.max(1, ...Object.values(peers).map((one) => one.total_bytes ?? 0));
  const sizesOf = (ids) => ids.map((id) => (peers[id]?.total_bytes ?? 0) / most);
  for (const [turn, stage] of (instance?.stages ?? []).entries()) {
    const ids = (stage.group?.peers ?? [stage.peer]).filter((id) => known(id) && !seen.has(id));
    if (!ids.length) continue;
    ids.forEach((id) => seen.add(id));
    members.push({ key: ids.join(" "), ids, stage, turn, sizes: sizesOf(ids), isGroup: (stage.group?.peers.length ?? 1) > 1, isLost: !(ids[0] in peers) });
  }
  const rest = Object.keys(peers).filter((id) => !seen.has(id)).sort((one, other) => peers[one].name.localeCompare(peers[other].name));
  for (const id of rest) members.push({ key: id, ids: [id], stage: null, turn: -1, sizes: sizesOf([id]), isGroup: false, isLost: false });
  for (const { id } of lost) if (!seen.has(id)) members.push({ key: id, ids: [id], stage: null, turn: -1, sizes: sizesOf([id]), isGroup: false, isLost: true });
  return members;
}

/** The radius of a peer: its area grows with its memory. size: its share of the largest memory. */
export function radiusOf(size, radius) {
  return Math.round(10 * radius * (LEAST + (1 - LEAST) * Math.sqrt(Math.max(0, Math.min(1, size))))) / 10;
}

/**
 * {width, height, radius, centre, places}. radius: of the peer with the most memory. centre: the centre of the ring; null
 * if it has no room for text. A place is {x, y, halfWidth, halfHeight, words, title, seats: [{x, y}], radii}. words:
 * whether the text is "above", "below", "left" or "right" of each seat. title: the y of a tensor group's title. radii: of
 * each seat.
 */
export function layoutOf(members, isNarrow) {
  const shape = SHAPES[isNarrow ? "narrow" : "wide"];
  const staged = members.filter(({ stage }) => stage);
  const ring = staged.length ? staged : members, bench = staged.length ? members.filter(({ stage }) => !stage) : [];
  const seats = ring.reduce((sum, { ids }) => sum + ids.length, 0);
  const radius = (seats > 5 ? 37 : 43) - (isNarrow ? 3 : 0);
  const made = seats <= 2 ? sideBySide(ring, shape, radius) : isNarrow ? columns(ring, shape, radius) : ellipse(ring, shape, radius);
  const rows = Math.ceil(bench.length / shape.perRow), row = 2 * radius + WORDS + 34;
  const benched = bench.map(({ ids }, index) => {
    const inRow = Math.min(shape.perRow, bench.length - shape.perRow * Math.floor(index / shape.perRow));
    const x = (shape.width * ((index % shape.perRow) + 0.5)) / inRow;
    return placeOf({ x, y: made.height + radius + 16 + row * Math.floor(index / shape.perRow) }, ids.length, radius, "below", false);
  });
  const places = [...made.places, ...benched];
  [...ring, ...bench].forEach(({ sizes, isGroup }, index) => {
    const place = places[index];
    place.radii = sizes.map(() => radiusOf(Math.max(...sizes), radius)); // the text of a group's ranks stays in a row
    if (!isGroup) place.halfWidth = place.halfHeight = place.radii[0];
  });
  return { width: shape.width, height: made.height + rows * row, radius, centre: made.centre, places };
}

/** The layout of one or two peers, or a tensor group of two. */
function sideBySide(ring, { width }, radius) {
  const y = radius + GAP + 36;
  const at = ring.length === 1 ? [width / 2] : [0.5 - 0.21 * (width > 400 ? 1 : 1.2), 0.5 + 0.21 * (width > 400 ? 1 : 1.2)].map((share) => share * width);
  const places = ring.map(({ ids }, index) => placeOf({ x: at[index], y }, ids.length, radius, "below", false));
  for (const place of places) place.title = place.y - place.halfHeight - 8;
  return { height: y + radius + WORDS + 48, centre: null, places };
}

/** The layout in two columns: down the right side and up the left side. */
function columns(ring, { width, words }, radius) {
  const half = Math.ceil(ring.length / 2), x = width / 2 - words - radius - 9;
  const tall = ({ ids }) => LINE * ids.length + (ids.length > 1 ? 4 * GAP : 0);
  const sides = [ring.slice(0, half), ring.slice(half).reverse()];
  const heights = sides.map((side) => side.reduce((sum, member) => sum + tall(member), 0));
  const height = Math.max(...heights), found = new Map();
  sides.forEach((side, which) => {
    let y = (height - heights[which]) / 2;
    for (const member of side) {
      const centre = { x: width / 2 + (which === 0 ? x : -x), y: y + tall(member) / 2 + 16 };
      found.set(member, placeOf(centre, member.ids.length, radius, which === 0 ? "right" : "left", true));
      y += tall(member);
    }
  });
  return { height: height + 26, centre: null, places: ring.map((member) => found.get(member)) };
}

/** The layout on an ellipse, clockwise from the top; each member gets length in proportion to its peers. */
function ellipse(ring, { width, words }, radius) {
  const weights = ring.map(({ ids }) => ids.length + (ids.length > 1 ? 0.6 : 0));
  const total = weights.reduce((sum, one) => sum + one, 0);
  const across = width / 2 - words - radius, down = Math.max(118, 27 * total + 30);
  const top = radius + WORDS + (ring[0].isGroup ? 36 + 3 * GAP : 36), centre = { x: width / 2, y: top + down };
  const at = (step) => ({ x: centre.x + across * Math.sin((2 * Math.PI * step) / STEPS), y: centre.y - down * Math.cos((2 * Math.PI * step) / STEPS) });
  const lengths = [0];
  for (let step = 1; step <= STEPS; step += 1) {
    const before = at(step - 1), here = at(step);
    lengths.push(lengths[step - 1] + Math.hypot(here.x - before.x, here.y - before.y));
  }
  let gone = -weights[0] / 2;
  const places = ring.map(({ ids }, index) => {
    const share = (gone + weights[index] / 2) / total;
    gone += weights[index];
    const place = at(lengths.findIndex((length) => length >= lengths[STEPS] * share));
    const side = (place.x - centre.x) / across, isBeside = Math.abs(side) > 0.45;
    const where = isBeside ? (side > 0 ? "right" : "left") : place.y < centre.y ? "above" : "below";
    return placeOf(place, ids.length, radius, where, isBeside);
  });
  const bottom = Math.max(...places.map(({ y, halfHeight, words: where }) => y + halfHeight + (where === "below" ? WORDS + 28 : 14)));
  return { height: Math.round(bottom), centre, places };
}

function placeOf({ x, y }, count, radius, words, isUpright) {
  const step = isUpright ? LINE : Math.max(2 * radius + GAP, words === "below" || words === "above" ? 96 : 0);
  const turns = Array.from({ length: count }, (_, seat) => (seat - (count - 1) / 2) * step);
  const seats = turns.map((turn) => (isUpright ? { x, y: y + turn } : { x: x + turn, y }));
  const along = ((count - 1) / 2) * step, round = radius + (count > 1 ? GAP : 0);
  const halfHeight = round + (isUpright ? along : 0);
  const title = { above: y - halfHeight - 60, below: y + halfHeight + 66 }[words] ?? y - halfHeight - 8;
  return { x, y, halfWidth: round + (isUpright ? 0 : along), halfHeight, words, title, seats };
}

/** The curve from one place to another, bent to the left, and its middle; both ends leave room for the members. */
export function hopOf(from, to, isPair) {
  const ends = [edgeOf(from, to), edgeOf(to, from)];
  const dx = to.x - from.x, dy = to.y - from.y, length = Math.hypot(dx, dy) || 1;
  const normal = { x: dy / length, y: -dx / length }, apart = isPair ? 16 : 0;
  const [start, end] = ends.map(({ x, y }) => ({ x: x + normal.x * apart, y: y + normal.y * apart }));
  const bend = isPair ? 34 : Math.min(0.2 * Math.hypot(end.x - start.x, end.y - start.y), 34);
  const control = { x: (start.x + end.x) / 2 + normal.x * bend, y: (start.y + end.y) / 2 + normal.y * bend };
  const middle = { x: (start.x + 2 * control.x + end.x) / 4, y: (start.y + 2 * control.y + end.y) / 4 };
  return { start, control, end, middle, normal };
}

function edgeOf(place, target) {
  const dx = target.x - place.x, dy = target.y - place.y, length = Math.hypot(dx, dy) || 1;
  const round = place.halfHeight / length;
  const flat = Math.min(place.halfWidth / Math.abs(dx || 1e-9), place.halfHeight / Math.abs(dy || 1e-9));
  const share = (place.seats.length > 1 ? flat : round) + 8 / length;
  return { x: place.x + dx * share, y: place.y + dy * share };
}
