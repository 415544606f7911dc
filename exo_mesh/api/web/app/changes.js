// Derives events from live documents: peers that joined or were lost, rings that were lost or recovered. Pure.

const KEPT = 12;

/** Adds the events between two documents to the list: {time, kind, name, detail}; the newest is last. */
export function withChanges(events, before, after) {
  if (!before) return events;
  const found = [...peerChanges(before, after), ...instanceChanges(events, before, after)];
  return found.length ? [...events, ...found.map((one) => ({ time: after.time, ...one }))].slice(-KEPT) : events;
}

function* peerChanges(before, after) {
  for (const [id, peer] of Object.entries(before.peers ?? {})) if (!(id in (after.peers ?? {}))) yield { kind: "lost", name: peer.name };
  for (const [id, peer] of Object.entries(after.peers ?? {})) if (!(id in (before.peers ?? {}))) yield { kind: "joined", name: peer.name };
}

function* instanceChanges(events, before, after) {
  for (const [id, old] of Object.entries(before.instances ?? {})) {
    const now = after.instances?.[id];
    if (!now) yield { kind: "unloaded", name: old.model, id };
    else if (old.state === "ready" && now.state === "loading") yield { kind: "recovering", name: now.model, id };
    else if (now.state === "failed" && old.state !== "failed") yield { kind: "failed", name: now.model, id };
    else if (now.state === "ready" && (old.state !== "ready" || counter(now) > counter(old))) {
      const began = events.findLast((one) => one.id === id);
      const recovered = isRecovering(events, id) || old.state === "ready";
      const took = began?.kind === "recovering" ? after.time - began.time : null;
      yield { kind: recovered ? "recovered" : "ready", name: now.model, id, took };
    }
  }
  for (const [id, now] of Object.entries(after.instances ?? {})) if (!before.instances?.[id]) yield { kind: "placed", name: now.model, id };
}

/** Whether an instance that was ready is recovering. */
export function isRecovering(events, id) {
  return events.findLast((one) => one.id === id)?.kind === "recovering";
}

const counter = (instance) => instance.ballot?.[0] ?? 0;
