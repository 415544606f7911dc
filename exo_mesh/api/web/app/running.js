// Answers that are being written. They go on while another view is shown, after a reload, and in one of several tabs.
import { call } from "./mesh.js";
import { follow } from "./answer.js";
import { PREFIX, listConversations, randomId, readConversation, saveConversation } from "./conversations.js";
import { answerElsewhere, hold, isElsewhere, listenToTabs, release, stopElsewhere, tell, unwatch, watch } from "./tabs.js";

const running = new Map(); // conversation id → {answer, stop, requestId}
const attaching = new Set();
const listeners = new Set();

/** listener(conversation): its answer has changed, or it has changed in another tab; without one only the list has. */
export function onRunning(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}
function changed(conversation = null) {
  for (const listener of listeners) listener(conversation);
}

export function answerOf(id) {
  return running.get(id)?.answer ?? answerElsewhere(id);
}

/** Ask for the next answer of a conversation, whose last message is the user's. */
export function start(conversation) {
  const clock = { started: Date.now(), first: null };
  conversation.running = { key: randomId(), requestId: `page-${randomId()}`, body: requestOf(conversation), clock };
  saveConversation(conversation);
  return read(conversation);
}

/** Take up all answers that conversations of this browser wait for. */
export function resume() {
  for (const conversation of listConversations()) attach(conversation);
}

/** Take up the answer that a conversation waits for, unless another tab reads it. It is computed again only if the mesh
 * does not know its key. */
export async function attach(conversation) {
  const { id } = conversation;
  if (running.has(id) || attaching.has(id) || !conversation.running) return;
  attaching.add(id);
  const elsewhere = await isElsewhere(id);
  attaching.delete(id);
  const now = readConversation(id); // it may have ended meanwhile
  if (!now?.running || running.has(id)) return changed(now);
  if (elsewhere) watch(id);
  else await read(now);
}

async function read(conversation) {
  const { id } = conversation;
  const stop = new AbortController();
  const { key, requestId, body, clock = { started: Date.now(), first: null } } = conversation.running;
  let timed = clock.first !== null;
  const entry = { answer: null, stop, requestId };
  running.set(id, entry);
  hold(id, () => entry.answer, () => stopHere(entry));
  let frame = 0;
  const show = (answer) => {
    entry.answer = answer;
    if (!timed && clock.first !== null) {
      timed = true;
      if (readConversation(id)) saveConversation(conversation); // after a reload the speed is still right
    }
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      tell(id);
      changed(conversation);
    });
  };
  const answer = await follow(body, key, requestId, clock, show, stop.signal);
  cancelAnimationFrame(frame);
  running.delete(id);
  release(id);
  if (answer.error?.code === "superseded") watch(id); // another tab has taken it over
  else finish(conversation, answer);
  changed(conversation);
}

function finish(conversation, answer) {
  const { text, reasoning, calls, finish: reason, error, tokens, ttft, speed } = answer;
  conversation.messages.push({ role: "assistant", content: text, reasoning, calls, finish: reason, error, tokens, ttft, speed });
  conversation.running = null;
  conversation.updated = Date.now();
  if (readConversation(conversation.id)) saveConversation(conversation); // it may have been deleted meanwhile
}

export function stop(id) {
  const entry = running.get(id);
  if (entry) stopHere(entry);
  else stopElsewhere(id);
}

function stopHere(entry) {
  entry.stop.abort();
  call(`/v1/cancel/${entry.requestId}`, { method: "POST" }).catch(() => {}); // it may have ended by itself
}

listenToTabs(
  (id) => changed(readConversation(id)),
  (id) => {
    const conversation = readConversation(id);
    if (conversation) attach(conversation);
  },
);
/** Sent to this tab when another one has written. */
addEventListener("storage", ({ key }) => {
  if (!key?.startsWith(PREFIX)) return;
  const conversation = readConversation(key.slice(PREFIX.length));
  if (conversation && !conversation.running) unwatch(conversation.id);
  else if (conversation && !running.has(conversation.id)) watch(conversation.id);
  changed(conversation);
});

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

function requestOf({ model, settings, messages }) {
  const sent = messages.filter((one) => one.role === "user" || one.content).map(({ role, content }) => ({ role, content }));
  if (settings.system) sent.unshift({ role: "system", content: settings.system });
  const body = { model, messages: sent, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) {
    const value = (settings[name] ?? "") === "" ? NaN : Number(settings[name]);
    if (Number.isFinite(value)) body[name] = value;
  }
  return body;
}
