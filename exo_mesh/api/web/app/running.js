// Answers that are being written. They go on while another view is shown, and after a reload of the page.
import { call } from "./mesh.js";
import { follow } from "./answer.js";
import { randomId, readConversation, saveConversation } from "./conversations.js";

const running = new Map(); // conversation id → {answer, stop}
const listeners = new Set();

export function onRunning(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}
function changed(id) {
  for (const listener of listeners) listener(id);
}

export function answerOf(id) {
  return running.get(id)?.answer ?? null;
}

/** Ask for the next answer of a conversation, whose last message is the user's. */
export function start(conversation) {
  conversation.running = { key: randomId(), requestId: `page-${randomId()}`, body: requestOf(conversation) };
  saveConversation(conversation);
  return attach(conversation);
}

/** Take up the answer that a conversation waits for. It is a new request only if the mesh does not know its key. */
export async function attach(conversation) {
  const { id } = conversation;
  if (running.has(id) || !conversation.running) return;
  const stop = new AbortController();
  const { key, requestId, body } = conversation.running;
  const entry = { answer: null, stop, requestId };
  running.set(id, entry);
  let frame = 0;
  const show = (answer) => {
    entry.answer = answer;
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      changed(id);
    });
  };
  const answer = await follow(body, key, requestId, show, stop.signal);
  cancelAnimationFrame(frame);
  running.delete(id);
  finish(conversation, answer);
  changed(id);
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
  if (!entry) return;
  entry.stop.abort();
  call(`/v1/cancel/${entry.requestId}`, { method: "POST" }).catch(() => {}); // it may have ended by itself
}

function requestOf({ model, settings, messages }) {
  const sent = messages.filter((one) => one.role === "user" || one.content).map(({ role, content }) => ({ role, content }));
  if (settings.system) sent.unshift({ role: "system", content: settings.system });
  const body = { model, messages: sent, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens"]) {
    const value = settings[name] === "" ? NaN : Number(settings[name]);
    if (Number.isFinite(value)) body[name] = value;
  }
  return body;
}
