// Reads one streamed answer to its end, and switches to another node if its node dies: see docs/how-it-works/continuation.md.
import { ApiError, UnreachableError, bases, fetchAt, leave, mesh, untilKey } from "./mesh.js";
import { SilenceError, readEvents } from "./sse.js";

const HEAD_MS = 10000; // for a waiting request the node sends the head after 2 s
const SILENCE_MS = 10000; // and then a comment every 2 s
const PATIENCE_MS = 90000; // give up after this time without progress
const PAUSE_MS = 700;
/** Statuses that a retry, or another node, can resolve; only after an answer has begun. */
const PASSING = new Set([404, 429, 502, 503, 504]);

export function blankAnswer() {
  return { text: "", reasoning: "", calls: [], finish: null, error: null, waiting: "", id: null, usage: null,
    tokens: 0, ttft: null, speed: null };
}

class BrokenError extends Error {}

/**
 * Follows a request to its end and calls onChange(answer) for each event. Resolves to the answer; its `error` has the
 * reason of a failure. signal: stops it. key: the Idempotency-Key that identifies the answer at every node. clock: the
 * times of the request and of the first token, which is set here (Date.now, so that they stay valid after a reload).
 */
export async function follow(body, key, requestId, clock, onChange, signal) {
  let answer = blankAnswer();
  let last = { base: null, id: null };
  let progressAt = performance.now();
  for (let attempt = 0; ; attempt += 1) {
    const base = mesh.base;
    // The same node sends only the rest of the answer. Another node sends the whole answer, which replaces the text.
    const resumes = base === last.base && last.id !== null;
    const made = resumes ? answer : blankAnswer();
    made.base = base; // the node that sends it
    const progress = (id) => {
      progressAt = performance.now();
      if (id !== null) last = { base, id };
      if (made.text.length + made.reasoning.length >= answer.text.length + answer.reasoning.length) answer = made;
      answer.waiting = made === answer ? made.waiting : "reconnecting"; // the shown text stays until the new text is as long
      onChange(answer);
    };
    try {
      await once(base, body, headers(key, requestId, resumes ? last.id : null), made, clock, progress, signal);
      onChange(made);
      return made;
    } catch (error) {
      if (signal.aborted) return { ...answer, waiting: "", finish: "stopped" };
      if (error.status === 401) {
        await Promise.race([untilKey(), aborted(signal)]);
        if (signal.aborted) return { ...answer, waiting: "", finish: "stopped" };
        progressAt = performance.now();
        continue;
      }
      const begun = attempt > 0 || answer.id !== null;
      const passes = error instanceof BrokenError || error instanceof SilenceError || error instanceof UnreachableError ||
        error instanceof TypeError || (begun && PASSING.has(error.status));
      if (!passes || performance.now() - progressAt > PATIENCE_MS) {
        return { ...answer, waiting: "", error: { code: error.code ?? "", message: error.message } };
      }
      answer.waiting = "reconnecting";
      onChange(answer);
      leave(base);
      if (attempt >= bases().length - 1 || bases().length < 2) await pause(PAUSE_MS);
    }
  }
}

function headers(key, requestId, lastId) {
  const made = { "Content-Type": "application/json", "Idempotency-Key": key, "x-request-id": requestId };
  return lastId === null ? made : { ...made, "Last-Event-ID": lastId };
}

/** Makes one attempt at one node. Raises unless the answer is complete. */
async function once(base, body, headers, answer, clock, progress, signal) {
  const options = { method: "POST", headers, body: JSON.stringify(body), signal };
  const reply = await fetchAt(base, "/v1/chat/completions", options, HEAD_MS);
  if (!reply.ok) throw new ApiError(reply.status, await reply.json().catch(() => null));
  let held = []; // a step is complete only with its id; an incomplete step is sent again after a reconnect
  for await (const event of readEvents(reply, SILENCE_MS)) {
    if (event.comment !== null) {
      answer.waiting = event.comment;
      progress(null);
    }
    if (!event.data) continue;
    if (event.data === "[DONE]") return;
    const chunk = JSON.parse(event.data);
    if (chunk.error) throw Object.assign(new Error(chunk.error.message), { code: chunk.error.code, status: statusOf(chunk.error) });
    held.push(chunk);
    if (event.id === null) continue;
    for (const one of held) add(answer, one, clock);
    held = [];
    progress(event.id);
  }
  throw new BrokenError("the stream ended before the answer did");
}

/** The status of an error inside a stream, which has none of its own: 503 if the node stops, else 0. */
function statusOf(error) {
  return error.type === "server_error" && /stopping|not_ready|draining/.test(error.code ?? "") ? 503 : 0;
}

function add(answer, chunk, clock) {
  answer.id = chunk.id;
  answer.waiting = "";
  if (chunk.usage) answer.usage = chunk.usage;
  for (const { delta, finish_reason: finish } of chunk.choices) {
    if (finish) answer.finish = finish;
    if (delta.reasoning_content) answer.reasoning += delta.reasoning_content;
    if (delta.content) answer.text += delta.content;
    for (const call of delta.tool_calls ?? []) addCall(answer.calls, call);
    if (delta.content || delta.reasoning_content || delta.tool_calls) count(answer, clock);
  }
  if (answer.usage) measure(answer, clock, answer.usage.completion_tokens);
}

function addCall(calls, { index, id, function: part }) {
  calls[index] ??= { id, name: "", arguments: "" };
  if (part?.name) calls[index].name = part.name;
  calls[index].arguments += part?.arguments ?? "";
}

function count(answer, clock) {
  clock.first ??= Date.now();
  answer.ttft = (clock.first - clock.started) / 1000;
  answer.tokens += 1;
  measure(answer, clock, answer.tokens);
}

function measure(answer, clock, tokens) {
  const seconds = (Date.now() - (clock.first ?? clock.started)) / 1000;
  answer.tokens = tokens;
  answer.speed = seconds > 0.05 && tokens > 1 ? (tokens - 1) / seconds : null;
}

function aborted(signal) {
  return new Promise((resolve) => signal.addEventListener("abort", resolve, { once: true }));
}

function pause(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}
