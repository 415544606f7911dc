// Running answers. They continue while another view is shown and after a reload; only one of several tabs reads each.
import { call } from "./mesh.js";
import { blankAnswer, follow } from "./answer.js";
import { finalWork, workOf } from "./attribution.js";
import { listConversations, onWritten, randomId, readConversation, saveConversation } from "./conversations.js";
import { models } from "./models.js";
import { requestOf } from "./requesting.js";
import { answerElsewhere, hold, isElsewhere, listenToTabs, publish, release, stopElsewhere, unwatch, watch } from "./tabs.js";
import { opened } from "./versions.js";
import { MOST_ROUNDS, areOurs, resultOf } from "./web_tools.js";

const running = new Map(); // conversation id → {answer, stop, requestId}
const attaching = new Set();
const listeners = new Set();
const readers = new Set();

/** listener(id): called when a conversation has changed, here or in another tab, but not when only its running answer
 * has grown. */
export function onRunning(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}
function changed(id) {
  for (const listener of listeners) listener(id);
}

/** reader(id): called when the running answer of a conversation has grown, at most once a frame. */
export function onGrowing(reader) {
  readers.add(reader);
  return () => readers.delete(reader);
}
function grown(id) {
  for (const reader of readers) reader(id);
}

export function answerOf(id) {
  return running.get(id)?.answer ?? answerElsewhere(id);
}

/** Requests the next answer of a conversation. versions: of this answer, if there are others. begun: a stopped answer,
 * no longer in the conversation, that the new one continues. */
export function start(conversation, { versions, begun = null, round = 0 } = {}) {
  const clock = { started: Date.now(), first: null };
  const body = requestOf(conversation, models.list.find((one) => one.id === conversation.model), begun);
  conversation.running = { key: randomId(), requestId: `page-${randomId()}`, body, clock, begun, round, ...(versions ? { versions } : {}) };
  saveConversation(conversation);
  return read(conversation);
}

/** Another answer to the message before the one at this index, which stays as a version. */
export function startAgain(conversation, index) {
  const { messages, versions } = opened(conversation.messages, index);
  conversation.messages = messages;
  return start(conversation, { versions });
}

/** Continues the last answer of a conversation where its text, or without a text its reasoning ends. */
export function startOnward(conversation) {
  const begun = conversation.messages.at(-1);
  conversation.messages = conversation.messages.slice(0, -1);
  return start(conversation, { begun, versions: begun.versions });
}

/** Resumes all answers that conversations of this browser wait for. */
export function resume() {
  for (const conversation of listConversations()) if (conversation.running) attach(conversation);
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
  if (!now?.running || running.has(id)) return changed(id);
  if (elsewhere) watch(id);
  else await read(now);
}

async function read(conversation) {
  const { id } = conversation;
  const stop = new AbortController();
  const { key, requestId, body, begun = null, clock = { started: Date.now(), first: null } } = conversation.running;
  let timed = clock.first !== null;
  const entry = { answer: begun ? joined(begun, { ...blankAnswer(), waiting: "sending" }) : null, stop, requestId };
  running.set(id, entry);
  hold(id, () => entry.answer, () => stopHere(entry));
  let frame = 0;
  const show = (answer) => {
    answer.work = workOf(requestId, answer, () => running.get(id) === entry && show(answer));
    entry.answer = begun ? joined(begun, answer) : answer;
    if (!timed && clock.first !== null) {
      timed = true;
      if (readConversation(id)) saveConversation(conversation); // keeps the speed correct after a reload
    }
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      publish(id);
      grown(id);
    });
  };
  changed(id);
  const answer = await follow(body, key, requestId, clock, show, stop.signal);
  answer.work = await finalWork(requestId, stop.signal.aborted);
  cancelAnimationFrame(frame);
  if (answer.error?.code === "superseded") {
    forget(id);
    watch(id); // another tab has taken over the answer
  } else {
    await finish(conversation, begun ? joined(begun, answer) : answer, entry);
  }
  changed(id);
}

function forget(id) {
  running.delete(id);
  release(id);
}

/** An answer that continues another one, as one answer. */
function joined(begun, answer) {
  const text = /\s$/.test(begun.content) ? answer.text.trimStart() : answer.text; // templates strip white space at the end
  const reasoning = begun.content ? begun.reasoning || answer.reasoning : (begun.reasoning ?? "") + answer.reasoning;
  return { ...answer, text: begun.content + text, reasoning, tokens: (begun.tokens ?? 0) + answer.tokens, ttft: begun.ttft ?? answer.ttft };
}

async function finish(conversation, answer, entry) {
  const { id } = conversation;
  const { text, reasoning, calls, finish: reason, error, tokens, ttft, speed, usage, work, id: answerId } = answer;
  const { versions, round = 0, requestId } = conversation.running;
  const made = { role: "assistant", content: text, reasoning, calls, finish: reason, error, tokens, ttft, speed, usage, work,
    id: answerId, requestId, model: conversation.model, ...(versions ? { versions } : {}) };
  const goesOn = !error && reason === "tool_calls" && areOurs(calls) && round < MOST_ROUNDS;
  let results = [];
  if (goesOn) {
    entry.answer = { ...answer, waiting: "tools" };
    grown(id);
    const texts = await Promise.all(calls.map(resultOf));
    results = calls.map((one, index) => ({ role: "tool", call: one.id, name: one.name, content: texts[index] }));
  }
  const kept = readConversation(id); // null if it was deleted; another object if another tab has written it
  const now = kept ?? conversation;
  now.messages = [...now.messages, made, ...results];
  now.updated = Date.now();
  forget(id);
  now.running = null;
  if (goesOn && kept && !entry.stop.signal.aborted) start(now, { round: round + 1 });
  else if (kept) saveConversation(now);
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
  grown,
  (id) => {
    const conversation = readConversation(id);
    if (conversation) attach(conversation);
  },
);
/** Another tab has written. */
onWritten((id) => {
  const conversation = readConversation(id);
  if (!conversation?.running) unwatch(id);
  else if (!running.has(id)) watch(id);
  changed(id);
});
