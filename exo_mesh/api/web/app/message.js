// One message of a conversation: Markdown, folded reasoning, tool calls, its versions, its speed, and what can be done.
import { perLap } from "./context_use.js";
import { WhoComputed } from "./attribution.js";
import { Markdown } from "./markdown.js";
import { copyText } from "./code_blocks.js";
import { number, seconds } from "./format.js";
import { Icon, IconButton } from "./icons.js";
import { placeOf } from "./versions.js";
import { html, useLayoutEffect, useRef, useState } from "./ui.js";
import { t } from "./strings.js";

/** acts: {edit(text), again(), onward(), branch(), turn(step)}, each only where it is possible. results: of the calls. */
export function Message({ message, acts = {}, results = [] }) {
  return message.role === "user" ? html`<${Question} message=${message} acts=${acts} />` : html`<${Answer} message=${message} acts=${acts} results=${results} />`;
}

function Question({ message, acts }) {
  const [edits, setEdits] = useState(false);
  const { content, images = [], files = [] } = message;
  return html`<article class="message user" aria-label=${t("chat.you")}>
    ${images.length > 0 && html`<div class="images">${images.map((url, index) => html`<img key=${index} src=${url} alt=${t("chat.imageNumber", { n: index + 1 })} />`)}</div>`}
    ${files.length > 0 && html`<${Files} files=${files} />`}
    ${edits ? html`<${Editor} text=${content} save=${(text) => { setEdits(false); acts.edit(text); }} cancel=${() => setEdits(false)} />`
      : content && html`<div class="plain bubble" dir="auto">${content}</div>`}
    ${!edits && html`<footer><div class="acts"><${Versions} message=${message} turn=${acts.turn} />
      ${acts.edit && html`<${IconButton} icon="edit" class="edit" label=${t("chat.edit")} onClick=${() => setEdits(true)} />`}
      ${content && html`<${CopyAll} text=${content} />`}</div></footer>`}</article>`;
}

function Files({ files }) {
  return html`<ul class="files" aria-label=${t("files.attached")}>${files.map((one, index) => html`<li key=${index}><${Icon} name="file" /><span>${one.name}</span></li>`)}</ul>`;
}

function Editor({ text: before, save, cancel }) {
  const [text, setText] = useState(before);
  const field = useRef(null);
  useLayoutEffect(() => { field.current.focus(); field.current.setSelectionRange(before.length, before.length); }, []);
  useLayoutEffect(() => { field.current.style.height = "auto"; field.current.style.height = `${Math.min(field.current.scrollHeight + 2, 400)}px`; }, [text]);
  const submit = (event) => { event.preventDefault(); if (text.trim()) save(text.trim()); };
  const pressed = (event) => {
    if (event.key === "Escape") { event.preventDefault(); cancel(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  return html`<form class="editor" onSubmit=${submit} onKeyDown=${pressed}>
    <textarea ref=${field} aria-label=${t("chat.editing")} dir="auto" value=${text} onInput=${(event) => setText(event.target.value)}></textarea>
    <p class="quiet">${t("chat.editNote")}</p>
    <div class="choices"><button type="button" onClick=${cancel}>${t("chat.cancel")}</button>
      <button type="submit" class="primary" disabled=${!text.trim()}>${t("chat.send")}</button></div></form>`;
}

/** An answer. isRunning: it grows. */
export function Answer({ message, acts = {}, results = [], isRunning = false }) {
  const text = message.content ?? message.text ?? "";
  return html`<article class="message assistant" aria-label=${message.model || t("chat.model")} aria-busy=${isRunning}>
    <header aria-hidden="true">${message.model || t("chat.model")}</header>
    ${message.reasoning && html`<${Reasoning} text=${message.reasoning} isGrowing=${isRunning && !text} />`}
    ${text && html`<${Markdown} text=${text} isGrowing=${isRunning} />`}
    ${message.calls?.map((call) => html`<${ToolCall} call=${call} key=${call.id} result=${results.find((one) => one.call === call.id)} />`)}
    ${isRunning && (message.waiting || !text) && html`<p class="waiting"><span class="spinner" aria-hidden="true"></span>${waitingText(message.waiting)}</p>`}
    ${message.error && html`<p class="error" role="alert">${message.error.message}</p>`}
    <${WhoComputed} work=${message.work} />
    <${Foot} message=${message} acts=${acts} text=${text} isRunning=${isRunning} />
  </article>`;
}

function Foot({ message, acts, text, isRunning }) {
  const ended = { length: "chat.cut", stopped: "chat.stopped" }[message.finish];
  const figures = [
    message.tokens > 0 && t("chat.tokens", { n: number(message.tokens) }),
    message.speed && t("chat.speed", { n: number(message.speed, 1) }),
    perLap(message.usage) && t("chat.per_lap", { n: number(perLap(message.usage), 1) }),
    message.ttft !== null && message.ttft !== undefined && t("chat.first", { time: seconds(message.ttft) }),
  ].filter(Boolean);
  return html`<footer>
    ${ended && !isRunning && html`<p class="ended"><span class="warn">${t(ended)}</span>
      ${acts.onward && html`<button type="button" class="small" onClick=${acts.onward}><${Icon} name="onward" />${t("chat.onward")}</button>`}</p>`}
    <div class="acts">
      ${!isRunning && html`<${Versions} message=${message} turn=${acts.turn} />
        ${text && html`<${CopyAll} text=${text} />`}
        ${acts.again && html`<${IconButton} icon="again" class="again" label=${t("chat.again")} onClick=${acts.again} />`}
        ${acts.branch && html`<${IconButton} icon="branch" label=${t("chat.branch")} onClick=${acts.branch} />`}`}
      ${figures.length > 0 && html`<span class="figures">${figures.join(" · ")}</span>`}
    </div></footer>`;
}

/** Turns between the versions of a message: ‹ 2/3 ›. */
function Versions({ message, turn }) {
  const place = placeOf(message);
  if (!place || !turn) return null;
  const { at, of } = place;
  return html`<span class="versions" role="group" aria-label=${t("chat.versions")}>
    <${IconButton} icon="left" label=${t("chat.versionBefore")} disabled=${at === 0} onClick=${() => turn(-1)} />
    <span aria-live="polite">${at + 1}/${of}</span>
    <${IconButton} icon="right" label=${t("chat.versionAfter")} disabled=${at === of - 1} onClick=${() => turn(1)} /></span>`;
}

function Reasoning({ text, isGrowing }) {
  return html`<details class="reasoning" open=${isGrowing}><summary>${t(isGrowing ? "chat.thinking" : "chat.reasoning")}</summary><${Markdown} text=${text} isGrowing=${isGrowing} /></details>`;
}

function ToolCall({ call, result }) {
  return html`<details class="call" open=${!result}><summary>${t(result ? "chat.called" : "chat.call", { name: call.name })}</summary><pre>${pretty(call.arguments)}</pre>
    ${result && html`<pre class="result">${pretty(result.content).slice(0, 4000)}</pre>`}</details>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // incomplete arguments are not valid JSON yet
  }
}

function CopyAll({ text }) {
  const [done, setDone] = useState(false);
  const copy = async () => { setDone(await copyText(text)); setTimeout(() => setDone(false), 1500); };
  return html`<${IconButton} icon=${done ? "check" : "copy"} label=${t(done ? "chat.copied" : "chat.copy")} onClick=${copy} />`;
}

/** Translates a comment of a waiting stream: `fetching 12 % of 9.60 GB`, `loading 3/8`, `queued 3 of 7, about 12 s`. */
export function waitingText(comment) {
  const [, phase, rest] = /^(\w+)[ ]?(.*)$/.exec(comment ?? "") ?? [null, "", ""];
  const [, place, length, time] = /^(\d+) of (\d+)(?:, about (.+))?$/.exec(rest) ?? [];
  if (phase === "queued" && place) return t(time ? "wait.queued_about" : "wait.queued", { place, length, time });
  const known = ["fetching", "loading", "prefill", "reconnecting", "tools"];
  return known.includes(phase) ? t(`wait.${phase}`, { rest }).replace(/:\s*$/, " …") : t("wait.other");
}
