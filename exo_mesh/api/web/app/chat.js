// The chat view: the conversations of this browser, the open one, and its running answer.
import { Composer } from "./composer.js";
import { deleteConversation, exportConversations, importConversations, listConversations, newConversation, saveConversation } from "./conversations.js";
import { mesh } from "./mesh.js";
import { Message } from "./message.js";
import { useModels } from "./models.js";
import { takesImages } from "./pictures.js";
import { readinessOf } from "./readiness.js";
import { ReadinessBar } from "./readiness_bar.js";
import { answerOf, onRunning, start, stop } from "./running.js";
import { html, useEffect, useLayoutEffect, useReducer, useRef, useState } from "./ui.js";
import { t } from "./strings.js";

let open = null; // the shown conversation; kept while another view is shown

function opened() {
  open ??= listConversations()[0] ?? newConversation();
  return open;
}

export function ChatView() {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const [listShown, showList] = useState(false);
  const [settingsShown, showSettings] = useState(false);
  const [note, setNote] = useState(null); // {text, isGood}
  const { list: all, loaded } = useModels();
  const list = all.filter((one) => one.tasks?.includes("text_generation") ?? true); // others cannot chat
  const conversation = opened();
  const answer = answerOf(conversation.id);
  const isRunning = Boolean(conversation.running);
  useLayoutEffect(() => onRunning((changed) => {
    if (changed && changed.id === open?.id) open = changed;
    redraw();
  }), []);
  useEffect(() => listenToKeys(() => isRunning && stop(conversation.id)), [conversation.id, isRunning]);
  if (!conversation.model && list.length) conversation.model = (list.find((one) => one.status === "loaded") ?? list[0]).id;

  const readiness = readinessOf(conversation.model, mesh.document);

  const show = (one) => { open = one; showList(false); redraw(); };
  const ask = () => { setNote(null); start(conversation); redraw(); };
  const send = (text, images) => {
    conversation.title ||= text.slice(0, 60) || t("chat.images");
    conversation.messages.push({ role: "user", content: text, ...(images.length ? { images } : {}) });
    conversation.updated = Date.now();
    delete conversation.draft;
    delete conversation.draftImages;
    if (!saveConversation(conversation)) setNote({ text: t("chat.full") });
    ask();
  };
  const again = () => { conversation.messages.pop(); ask(); };
  /** Makes a new conversation from the messages before one, and puts that one into the field for editing. */
  const branch = (index) => {
    const made = { ...newConversation(conversation.model), settings: { ...conversation.settings } };
    const { content, images } = conversation.messages[index];
    show({ ...made, messages: structuredClone(conversation.messages.slice(0, index)), draft: content, draftImages: images });
  };
  /** Makes a new conversation from the messages up to an answer. */
  const copy = (index) => {
    const made = { ...newConversation(conversation.model), title: conversation.title, settings: { ...conversation.settings } };
    made.messages = structuredClone(conversation.messages.slice(0, index + 1));
    if (!saveConversation(made)) setNote({ text: t("chat.full") });
    show(made);
  };
  const editLast = () => {
    const index = conversation.messages.findLastIndex((one) => one.role === "user");
    if (index >= 0 && !isRunning) branch(index);
  };
  const change = (values) => { Object.assign(conversation, values); saveConversation(conversation); redraw(); };

  return html`<div class="chat ${listShown ? "list-shown" : ""}">
    <${ConversationList} current=${conversation} show=${show} setNote=${setNote} redraw=${redraw} />
    <section class="talk" aria-label=${t("nav.chat")}>
      <div class="bar">
        <button type="button" class="only-narrow" aria-expanded=${listShown} aria-label=${t("chat.list")} onClick=${() => showList(!listShown)}>☰</button>
        <label class="model-choice"><span class="hidden">${t("chat.model")}</span>
          <select value=${conversation.model} disabled=${isRunning} onChange=${(event) => change({ model: event.target.value })}>
            ${list.every((one) => one.id !== conversation.model) && html`<option value=${conversation.model}>${conversation.model || t(loaded ? "chat.noModel" : "chat.looking")}</option>`}
            ${list.map((one) => html`<option key=${one.id} value=${one.id}>${one.id}${one.status === "loaded" ? "" : ` (${t("models.notLoaded")})`}</option>`)}
          </select>
        </label>
        <button type="button" aria-expanded=${settingsShown} aria-label=${t("chat.options")} onClick=${() => showSettings(!settingsShown)}>
          <span class="word">${t("chat.options")}</span><span class="sign" aria-hidden="true">⚙</span></button>
      </div>
      ${settingsShown && html`<${Sampling} settings=${conversation.settings} change=${(settings) => change({ settings })} />`}
      <${Messages} conversation=${conversation} answer=${answer} isRunning=${isRunning} again=${again} edit=${branch} copy=${copy} />
      <p class="note ${note?.isGood ? "good" : ""}" role="alert">${note?.text}</p>
      ${mesh.document && !isRunning && html`<${ReadinessBar} model=${conversation.model} readiness=${readiness} />`}
      <${Composer} key=${conversation.id} draft=${conversation.draft ?? ""} draftImages=${conversation.draftImages ?? []} say=${(words) => setNote({ text: words })} canShow=${takesImages(list.find((one) => one.id === conversation.model))} isRunning=${isRunning} canSend=${Boolean(conversation.model) && readiness.state !== "waiting"} send=${send} editLast=${editLast} stop=${() => stop(conversation.id)} />
    </section>
  </div>`;
}

/** Handles keys in the whole view: Escape stops the answer, and "/" moves the focus to the message field. */
function listenToKeys(stopAnswer) {
  const pressed = (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") stopAnswer();
    if (event.key !== "/" || event.target.closest("input, textarea, select, dialog")) return;
    event.preventDefault();
    document.querySelector(".composer textarea")?.focus();
  };
  addEventListener("keydown", pressed);
  return () => removeEventListener("keydown", pressed);
}

function ConversationList({ current, show, setNote, redraw }) {
  const file = useRef(null);
  const remove = (one) => {
    if (!confirm(t("chat.sure", { title: one.title || t("chat.untitled") }))) return;
    stop(one.id);
    deleteConversation(one.id);
    if (one.id === current.id) open = null;
    redraw();
  };
  const download = () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([exportConversations()], { type: "application/json" }));
    link.download = "exo-mesh-conversations.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const upload = async (event) => {
    try {
      setNote({ text: t("chat.imported", { n: importConversations(await event.target.files[0].text()) }), isGood: true });
    } catch {
      setNote({ text: t("chat.notImported") });
    }
    event.target.value = "";
    redraw();
  };
  const kept = listConversations();
  return html`<aside class="conversations" aria-label=${t("chat.list")}>
    <button type="button" class="primary" onClick=${() => show(newConversation(current.model))}>${t("chat.new")}</button>
    <ul>${kept.map((one) => html`<li key=${one.id} class=${one.id === current.id ? "current" : ""}>
      <button type="button" class="title" title=${one.title} aria-current=${one.id === current.id ? "true" : undefined} onClick=${() => show(one.id === current.id ? current : one)}>
        ${one.running && html`<span class="spinner" role="img" aria-label=${t("chat.answering")}></span>`}${one.title || t("chat.untitled")}</button>
      <button type="button" class="remove" aria-label=${t("chat.delete", { title: one.title })} onClick=${() => remove(one)}>×</button>
    </li>`)}</ul>
    <div class="choices">
      <button type="button" disabled=${!kept.length} onClick=${download}>${t("chat.export")}</button>
      <button type="button" onClick=${() => file.current.click()}>${t("chat.import")}</button>
      <input ref=${file} type="file" accept="application/json" hidden onChange=${upload} />
    </div>
  </aside>`;
}

function Sampling({ settings, change }) {
  const set = (name) => (event) => change({ ...settings, [name]: event.target.value });
  const field = (name, step, max) => html`<label>${t(`sampling.${name}`)}
    <input type="number" min="0" max=${max} step=${step} value=${settings[name] ?? ""} placeholder=${t("sampling.default")} onInput=${set(name)} /></label>`;
  return html`<div class="sampling">
    <label class="wide">${t("sampling.system")}<textarea rows="2" value=${settings.system} onInput=${set("system")}></textarea></label>
    ${field("temperature", 0.1, 2)}${field("top_p", 0.05, 1)}${field("top_k", 1)}${field("min_p", 0.05, 1)}${field("max_tokens", 1)}${field("seed", 1)}
  </div>`;
}

function Messages({ conversation, answer, isRunning, again, edit, copy }) {
  const place = useRef(null);
  const follows = useRef(true);
  const { messages } = conversation;
  useLayoutEffect(() => { follows.current = true; }, [conversation.id, messages.length]);
  useLayoutEffect(() => { if (follows.current) place.current.scrollTop = place.current.scrollHeight; });
  const scrolled = () => {
    const { scrollTop, scrollHeight, clientHeight } = place.current;
    follows.current = scrollHeight - scrollTop - clientHeight < 60;
  };
  const last = messages.length - 1;
  return html`<div class="messages" ref=${place} onScroll=${scrolled} tabindex="0" role="log" aria-live="off" aria-label=${t("chat.messages")}>
    ${messages.length > 0 && html`<h1 class="hidden">${conversation.title || t("chat.untitled")}</h1>`}
    ${!messages.length && html`<div class="empty"><h1>${t("chat.hello")}</h1><p>${t("chat.hint")}</p></div>`}
    ${messages.map((message, index) => html`<${Message} key=${index} message=${message}
      copy=${message.role === "assistant" && message.content ? () => copy(index) : null}
      again=${index === last && message.role === "assistant" && !isRunning ? again : null}
      edit=${message.role === "user" && !isRunning ? () => edit(index) : null} />`)}
    ${isRunning && html`<${Message} key=${messages.length} message=${{ role: "assistant", ...(answer ?? { waiting: "sending" }) }} isRunning />`}
    <div class="hidden" role="status">${isRunning ? t("chat.answering") : messages.length ? t("chat.answered") : ""}</div>
  </div>`;
}
