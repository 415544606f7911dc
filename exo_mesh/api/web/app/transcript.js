// The messages of the open conversation, and its running answer. Only what has changed is drawn again.
import { Answer, Message } from "./message.js";
import { answerOf, onGrowing } from "./running.js";
import { html, useLayoutEffect, useMemo, useReducer, useRef, useState } from "./ui.js";
import { t } from "./strings.js";

const MOST_CHARACTERS = 50000; // of messages that are drawn at once; earlier ones follow with a button
const LEAST_MESSAGES = 6;
const NEAR = 60; // pixels from the end, within which the view follows a growing answer

/** acts: {edit(index, text), again(index), onward(), branch(index), turn(index, step)}. empty: shown without messages. */
export function Transcript({ conversation, isRunning, acts, empty }) {
  const place = useRef(null);
  const follows = useRef(true);
  const { id, messages } = conversation;
  const [parts, setParts] = useState({ id, count: 1 });
  const from = useMemo(() => firstShown(messages, MOST_CHARACTERS * (parts.id === id ? parts.count : 1)), [messages, parts, id]);
  const latest = useRef(acts);
  latest.current = acts;
  const follow = () => { if (follows.current && messages.length && place.current) place.current.scrollTop = place.current.scrollHeight; };
  useLayoutEffect(() => { follows.current = true; }, [id, messages.length]);
  useLayoutEffect(follow);
  const scrolled = () => {
    const { scrollTop, scrollHeight, clientHeight } = place.current;
    follows.current = scrollHeight - scrollTop - clientHeight < NEAR;
  };
  const shown = useMemo(() => turnsOf(messages, isRunning, latest).slice(from), [messages, isRunning, from]);
  const height = useRef(0); // before earlier messages were added
  useLayoutEffect(() => {
    if (height.current) place.current.scrollTop += place.current.scrollHeight - height.current;
    height.current = 0;
  }, [from]);
  const showEarlier = () => {
    height.current = place.current.scrollHeight;
    setParts({ id, count: (parts.id === id ? parts.count : 1) + 1 });
  };
  return html`<div class="messages" ref=${place} onScroll=${scrolled} tabindex="0" role="log" aria-live="off" aria-label=${t("chat.messages")}>
    ${messages.length > 0 && html`<h1 class="hidden">${conversation.title || t("chat.untitled")}</h1>`}
    ${!messages.length && empty}
    ${from > 0 && html`<button type="button" class="earlier" onClick=${showEarlier}>${t("chat.earlier", { n: from })}</button>`}
    ${shown}
    ${isRunning && html`<${Running} key=${`running ${id}`} id=${id} model=${conversation.model} follow=${follow} />`}
    <div class="hidden" role="status">${isRunning ? t("chat.answering") : messages.length ? t("chat.answered") : ""}</div>
  </div>`;
}

/** The index of the first message to draw, so that those from it on have at most so many characters. */
export function firstShown(messages, mostCharacters) {
  let first = messages.length, characters = 0;
  while (first > 0 && (messages.length - first < LEAST_MESSAGES || characters < mostCharacters)) {
    first -= 1;
    characters += (messages[first].content ?? "").length + (messages[first].reasoning ?? "").length;
  }
  return messages[first]?.role === "tool" ? Math.max(0, first - 1) : first;
}

/** The elements of the messages; results of tools are shown with their calls. acts: a reference to the newest ones. */
function turnsOf(messages, isRunning, acts) {
  const last = messages.length - 1;
  return messages.map((message, index) => {
    if (message.role === "tool") return null;
    const can = isRunning ? {} : { turn: (step) => acts.current.turn(index, step) };
    if (message.role === "user" && !isRunning) can.edit = (text) => acts.current.edit(index, text);
    if (message.role === "assistant" && !isRunning && index === last) {
      can.again = () => acts.current.again(turnBegin(messages));
      const isOpen = ["stopped", "length"].includes(message.finish) && (message.content || message.reasoning) && !message.calls?.length;
      if (isOpen) can.onward = () => acts.current.onward();
    }
    if (message.role === "assistant" && message.content) can.branch = () => acts.current.branch(index);
    const results = message.calls?.length ? messages.slice(index + 1).filter((one) => one.role === "tool") : undefined;
    return html`<${Message} key=${index} message=${message} acts=${can} results=${results} />`;
  });
}

/** The index of the first message after the user's last one: an answer with tool calls is several messages. */
export function turnBegin(messages) {
  return messages.findLastIndex((one) => one.role === "user") + 1;
}

function Running({ id, model, follow }) {
  const [, redraw] = useReducer((count) => count + 1, 0);
  useLayoutEffect(() => onGrowing((grown) => grown === id && redraw()), [id]);
  useLayoutEffect(follow);
  const answer = answerOf(id) ?? { waiting: "sending" };
  return html`<${Answer} message=${{ model, ...answer }} isRunning />`;
}
