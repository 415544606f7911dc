// Coordinates the tabs of one browser. Only one tab reads a running answer; the others show the same text.

const CLAIM_MS = 300; // a tab that reads an answer replies at once to a question
const GONE_MS = 5000; // it reports every second and when it closes; after this time without a report it has crashed
const EVERY_MS = 1000;
const channel = new BroadcastChannel("exo-mesh.answers");
const shown = new Map(); // conversation id → {answer, heardAt} of an answer that another tab reads
const held = new Map(); // conversation id → {read, stop, wanted} of an answer that this tab reads
const claims = new Map(); // conversation id → called when another tab reports that it reads the answer
let onChange = () => {};
let onGone = () => {};

/** changed(id): called when another tab shows more text; gone(id): when the tab that read this answer has closed. */
export function listenToTabs(changed, gone) {
  onChange = changed;
  onGone = gone;
}

/** Whether another tab reads this answer. */
export async function isElsewhere(id) {
  channel.postMessage({ type: "who", id });
  const claimed = await new Promise((resolve) => {
    claims.set(id, () => resolve(true));
    setTimeout(() => resolve(false), CLAIM_MS);
  });
  claims.delete(id);
  return claimed;
}

export function answerElsewhere(id) {
  return shown.get(id)?.answer ?? null;
}

/** Marks an answer as read by this tab. read(): returns the text so far; stop(): called if another tab stops it. */
export function hold(id, read, stop) {
  shown.delete(id);
  held.set(id, { read, stop, wanted: false });
}

export function release(id) {
  held.delete(id);
}

/** Follows the tab that reads this answer. */
export function watch(id) {
  if (!shown.has(id)) shown.set(id, { answer: null, heardAt: performance.now() });
  channel.postMessage({ type: "who", id });
}

export function unwatch(id) {
  shown.delete(id);
}

export function stopElsewhere(id) {
  channel.postMessage({ type: "stop", id });
}

/** Sends this tab's text of an answer to the other tabs, if one of them has asked for it. */
export function publish(id) {
  const entry = held.get(id);
  if (entry?.wanted) channel.postMessage({ type: "here", id, answer: entry.read() });
}

channel.addEventListener("message", ({ data: { type, id, answer } }) => {
  const own = held.get(id);
  if (type === "who" && own) {
    own.wanted = true;
    publish(id);
  } else if (type === "stop") {
    own?.stop();
  } else if (type === "left" && shown.delete(id)) {
    onGone(id);
  } else if (type === "here" && !own) {
    claims.get(id)?.();
    shown.set(id, { answer, heardAt: performance.now() });
    onChange(id);
  }
});

addEventListener("pagehide", () => {
  for (const id of held.keys()) channel.postMessage({ type: "left", id });
});

setInterval(() => {
  for (const id of held.keys()) publish(id);
  for (const [id, { heardAt }] of shown) {
    if (performance.now() - heardAt < GONE_MS) continue;
    shown.delete(id);
    onGone(id);
  }
}, EVERY_MS);
