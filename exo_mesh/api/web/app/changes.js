// Derives events from live documents: peers that joined or were lost, rings that were lost or recovered. Pure.
import { takeovers } from "./who_computed.js";

const KEPT = 12;

/** Adds the events between two documents to the list: {time, kind, name}; the newest is last. A recovery also has the
 * time that it took, and `changes`: which stages took over (see who_computed.js). names: of all peers ever seen, by id,
 * because a peer may be gone before its stage is missed. */
export function withChanges(events, before, after, names = {}) {
  if (!before) return events;
  const found = [...peerChanges(before, after), ...instanceChanges(events, before, after, names)];
  return found.length ? [...events, ...found.map((one) => ({ time: after.time, ...one }))].slice(-KEPT) : events;
}

function* peerChanges(before, after) {
  for (const [id, peer] of Object.entries(before.peers ?? {})) if (!(id in (after.peers ?? {}))) yield { kind: "lost", name: peer.name };
  for (const [id, peer] of Object.entries(after.peers ?? {})) if (!(id in (before.peers ?? {}))) yield { kind: "joined", name: peer.name };
}

function* instanceChanges(events, before, after, names) {
  for (const [id, old] of Object.entries(before.instances ?? {})) {
    const now = after.instances?.[id];
    if (!now) yield { kind: "unloaded", name: old.model, id };
    else if (old.state === "ready" && now.state === "loading") yield { kind: "recovering", name: now.model, id, stages: stagesOf(old, names) };
    else if (now.state === "failed" && old.state !== "failed") yield { kind: "failed", name: now.model, id };
    else if (now.state === "ready" && (old.state !== "ready" || counter(now) > counter(old))) {
      const began = events.findLast((one) => one.id === id);
      const recovered = isRecovering(events, id) || old.state === "ready";
      const took = began?.kind === "recovering" ? after.time - began.time : null;
      const earlier = began?.stages ?? (old.state === "ready" ? stagesOf(old, names) : null);
      const changes = recovered && earlier ? changesOf(earlier, stagesOf(now, names), took) : [];
      if (recovered && !changes.length && !began?.stages) continue; // only its owner is another one
      yield { kind: recovered ? "recovered" : "ready", name: now.model, id, took, changes };
    }
  }
  for (const [id, now] of Object.entries(after.instances ?? {})) if (!before.instances?.[id]) yield { kind: "placed", name: now.model, id };
}

/** Whether an instance that was ready is recovering. */
export function isRecovering(events, id) {
  return events.findLast((one) => one.id === id)?.kind === "recovering";
}

/** The stages of an instance with the names of their peers. */
function stagesOf(instance, known) {
  return instance.stages.map(({ peer, group, layers, pid, endpoint }) => {
    const peers = group?.peers ?? [peer];
    return { peers, names: peers.map((id) => known[id] ?? id.slice(0, 8)), layers, process: `${pid} ${endpoint}` };
  });
}

function changesOf(before, after, took) {
  const isKept = (one) => before.some((other) => other.process === one.process && other.peers[0] === one.peers[0] && other.layers.join() === one.layers.join());
  return takeovers([{ stages: before }, { stages: after.map((one) => ({ ...one, is_new: !isKept(one) })), pause_s: took }]);
}

const counter = (instance) => instance.ballot?.[0] ?? 0;
