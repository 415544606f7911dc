// Running answers. They continue while another view is shown and after a reload; only one of several tabs reads each.
import { call } from "./mesh.js";
import { follow } from "./answer.js";
import { finalWork, workOf } from "./attribution.js";
import { PREFIX, listConversations, randomId, readConversation, saveConversation } from "./conversations.js";
import { contentOf } from "./pictures.js";
import { answerElsewhere, hold, isElsewhere, listenToTabs, publish, release, stopElsewhere, unwatch, watch } from "./tabs.js";

const running = new Map(); // conversation id → {answer, stop, requestId}
const attaching = new Set();
const listeners = new Set();

/** listener(conversation): called when a conversation or its answer has changed, here or in another tab; with null when
 * only the list has changed. */
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

/** Requests the next answer of a conversation; its last message must be the user's. */
export function start(conversation) {
  const clock = { started: Date.now(), first: null };
  conversation.running = { key: randomId(), requestId: `page-${randomId()}`, body: requestOf(conversation), clock };
  saveConversation(conversation);
  return read(conversation);
}

/** Resumes all answers that conversations of this browser wait for. */
export function resume() {
  for (const conversation of listConversations()) attach(conversation);
}

/** Resumes the answer that a conversation waits for, unless another tab reads it. The mesh computes it again only if it
 * does not know its key. */
export async function attach(conversation) {
  const { id } = conversation;
  if (running.has(id) || attaching.has(id) || !conversation.running) return;
  attaching.add(id);
  const elsewhere = await isElsewhere(id);
  attaching.delete(id);
  const now = readConversation(id); // the answer may have ended in the meantime
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
    entry.answer = { ...answer, work: workOf(requestId, answer, () => entry.answer && show(entry.answer)) };
    if (!timed && clock.first !== null) {
      timed = true;
      if (readConversation(id)) saveConversation(conversation); // keeps the speed correct after a reload
    }
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      publish(id);
      changed(conversation);
    });
  };
  const answer = await follow(body, key, requestId, clock, show, stop.signal);
  answer.work = await finalWork(requestId);
  cancelAnimationFrame(frame);
  running.delete(id);
  release(id);
  if (answer.error?.code === "superseded") watch(id); // another tab has taken over the answer
  else finish(conversation, answer);
  changed(conversation);
}

function finish(conversation, answer) {
  const { text, reasoning, calls, finish: reason, error, tokens, ttft, speed, work } = answer;
  conversation.messages.push({ role: "assistant", content: text, reasoning, calls, finish: reason, error, tokens, ttft, speed, work });
  conversation.running = null;
  conversation.updated = Date.now();
  if (readConversation(conversation.id)) saveConversation(conversation); // it may have been deleted in the meantime
}

export function stop(id) {
  const entry = running.get(id);
  if (entry) stopHere(entry);
  else stopElsewhere(id);
}

function stopHere(entry) {
  entry.stop.abort();
  call(`/v1/cancel/${entry.requestId}`, { method: "POST" }).catch(() => {}); // the answer may already have ended
}

listenToTabs(
  (id) => changed(readConversation(id)),
  (id) => {
    const conversation = readConversation(id);
    if (conversation) attach(conversation);
  },
);
/** The browser sends this event when another tab has written. */
addEventListener("storage", ({ key }) => {
  if (!key?.startsWith(PREFIX)) return;
  const conversation = readConversation(key.slice(PREFIX.length));
  if (conversation && !conversation.running) unwatch(conversation.id);
  else if (conversation && !running.has(conversation.id)) watch(conversation.id);
  changed(conversation);
});

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

function requestOf({ model, settings, messages }) {
  const sent = messages.filter((one) => one.role === "user" || one.content).map((one) => ({ role: one.role, content: contentOf(one) }));
  if (settings.system) sent.unshift({ role: "system", content: settings.system });
  const body = { model, messages: sent, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) {
    const value = (settings[name] ?? "") === "" ? NaN : Number(settings[name]);
    if (Number.isFinite(value)) body[name] = value;
  }
  return body;
}
