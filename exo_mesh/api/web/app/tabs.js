// Tabs of one browser share their conversations. Only one tab reads a running answer; the others show what it shows.

const CLAIM_MS = 300; // a tab that reads an answer says so at once
const GONE_MS = 5000; // it says so every second, and when it is closed: without a word for so long it has crashed
const EVERY_MS = 1000;
const channel = new BroadcastChannel("exo-mesh.answers");
const shown = new Map(); // conversation id → {answer, heardAt} of other tabs
const held = new Map(); // conversation id → {read, stop, wanted} of this tab
const claims = new Map(); // conversation id → what to do once another tab says that it has the answer
let onChange = () => {};
let onGone = () => {};

/** changed(id): another tab shows more; gone(id): the tab that read this answer is no more. */
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

/** This tab reads an answer from now on. read(): what it shows of it; stop(): what another tab may ask for. */
export function hold(id, read, stop) {
  shown.delete(id);
  held.set(id, { read, stop, wanted: false });
}

export function release(id) {
  held.delete(id);
}

/** Follow the tab that has this answer, which has said so or will. */
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

/** Show the other tabs what this one shows, if one of them has asked. */
export function tell(id) {
  const entry = held.get(id);
  if (entry?.wanted) channel.postMessage({ type: "here", id, answer: entry.read() });
}

channel.addEventListener("message", ({ data: { type, id, answer } }) => {
  const own = held.get(id);
  if (type === "who" && own) {
    own.wanted = true;
    tell(id);
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
  for (const id of held.keys()) tell(id);
  for (const [id, { heardAt }] of shown) {
    if (performance.now() - heardAt < GONE_MS) continue;
    shown.delete(id);
    onGone(id);
  }
}, EVERY_MS);
