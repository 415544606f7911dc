// One message of a conversation: Markdown, folded reasoning, tool calls, and its speed.
import { WhoComputed } from "./attribution.js";
import { Markdown, copyText } from "./markdown.js";
import { number, seconds } from "./format.js";
import { html, useState } from "./ui.js";
import { t } from "./strings.js";

export function Message({ message, isRunning = false, again = null, edit = null, copy = null }) {
  if (message.role === "user") {
    return html`<article class="message user" aria-label=${t("chat.you")}>
      ${message.images?.length > 0 && html`<div class="images">${message.images.map((url, index) => html`<img key=${index} src=${url} alt=${t("chat.imageNumber", { n: index + 1 })} />`)}</div>`}
      ${message.content && html`<div class="plain bubble">${message.content}</div>`}
      ${edit && html`<footer><button type="button" onClick=${edit}>${t("chat.edit")}</button></footer>`}</article>`;
  }
  const text = message.content ?? message.text ?? "";
  return html`<article class="message assistant" aria-label=${t("chat.model")} aria-busy=${isRunning}>
    ${message.reasoning && html`<${Reasoning} text=${message.reasoning} isOpen=${isRunning && !text} />`}
    ${text && html`<${Markdown} text=${text} />`}
    ${message.calls?.map((call) => html`<${ToolCall} call=${call} key=${call.id} />`)}
    ${isRunning && (message.waiting || !text) && html`<p class="waiting"><span class="spinner" aria-hidden="true"></span>${waitingText(message.waiting)}</p>`}
    ${message.error && html`<p class="error" role="alert">${message.error.message}</p>`}
    <${WhoComputed} work=${message.work} />
    <footer>
      ${message.tokens > 0 && html`<span>${t("chat.tokens", { n: number(message.tokens) })}</span>`}
      ${message.speed && html`<span>${t("chat.speed", { n: number(message.speed, 1) })}</span>`}
      ${message.ttft !== null && message.ttft !== undefined && html`<span>${t("chat.first", { time: seconds(message.ttft) })}</span>`}
      ${message.finish === "length" && html`<span class="warn">${t("chat.cut")}</span>`}
      ${!isRunning && text && html`<${CopyAll} text=${text} />`}
      ${copy && html`<button type="button" onClick=${copy}>${t("chat.branch")}</button>`}
      ${again && html`<button type="button" onClick=${again}>${t("chat.again")}</button>`}
    </footer>
  </article>`;
}

function Reasoning({ text, isOpen }) {
  return html`<details class="reasoning" open=${isOpen}><summary>${t("chat.reasoning")}</summary><${Markdown} text=${text} /></details>`;
}

function ToolCall({ call }) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {} // incomplete arguments are not valid JSON yet
  return html`<details class="call" open><summary>${t("chat.call", { name: call.name })}</summary><pre>${shown}</pre></details>`;
}

function CopyAll({ text }) {
  const [done, setDone] = useState(false);
  const copy = async () => { setDone(await copyText(text)); setTimeout(() => setDone(false), 1500); };
  return html`<button type="button" onClick=${copy}>${t(done ? "chat.copied" : "chat.copy")}</button>`;
}

/** Translates a comment of a waiting stream: `fetching 12 % of 9.60 GB`, `loading 3/8`, `queued 3 of 7, about 12 s`. */
export function waitingText(comment) {
  const [, phase, rest] = /^(\w+)[ ]?(.*)$/.exec(comment ?? "") ?? [null, "", ""];
  const [, place, length, time] = /^(\d+) of (\d+)(?:, about (.+))?$/.exec(rest) ?? [];
  if (phase === "queued" && place) return t(time ? "wait.queued_about" : "wait.queued", { place, length, time });
  const known = ["fetching", "loading", "prefill", "reconnecting"];
  return known.includes(phase) ? t(`wait.${phase}`, { rest }) : t("wait.other");
}
