// The chat view: the conversations of this browser, the open one, and its running answer.
import { Composer } from "./composer.js";
import { ConversationList } from "./conversation_list.js";
import { listConversations, newConversation, readConversation, saveConversation } from "./conversations.js";
import { MenuButton, closeDrawer } from "./drawer.js";
import { FirstLook } from "./first_look.js";
import { IconButton } from "./icons.js";
import { mesh } from "./mesh.js";
import { useModels } from "./models.js";
import { OptionsPanel } from "./options_panel.js";
import { apply, readPresets } from "./presets.js";
import { readinessOf } from "./readiness.js";
import { ReadinessBar } from "./readiness_bar.js";
import { onRunning, start, startAgain, startOnward, stop } from "./running.js";
import { Transcript } from "./transcript.js";
import { html, useEffect, useLayoutEffect, useReducer, useState } from "./ui.js";
import { t } from "./strings.js";
import { opened as withoutTail, turned } from "./versions.js";

let open = null; // the shown conversation; kept while another view is shown

function opened(models) {
  open ??= listConversations()[0] ?? fresh(models);
  return open;
}

/** A new conversation with the preferred preset, if there is one. */
function fresh(models, model = "") {
  const made = newConversation(model);
  const { list, preferred } = readPresets();
  const preset = list.find((one) => one.name === preferred);
  if (preset) apply(preset, made, models);
  return made;
}

export function ChatView() {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const [optionsShown, showOptions] = useState(false);
  const [note, setNote] = useState(null); // {text, isGood}
  const { list: all, loaded } = useModels();
  const list = all.filter((one) => one.tasks?.includes("text_generation") ?? true); // others cannot chat
  const conversation = opened(list);
  const isRunning = Boolean(conversation.running);
  useLayoutEffect(() => onRunning((id) => {
    if (id === open?.id) open = readConversation(id) ?? open;
    redraw();
  }), []);
  useEffect(() => listenToKeys(() => isRunning && stop(conversation.id)), [conversation.id, isRunning]);
  if (!conversation.model && list.length) conversation.model = (list.find((one) => one.status === "loaded") ?? list[0]).id;
  const model = list.find((one) => one.id === conversation.model);
  const readiness = readinessOf(conversation.model, mesh.document);
  const say = (text) => setNote(text ? { text } : null);

  const show = (one) => {
    open = one?.messages.length === 0 ? fresh(list, one.model) : one;
    setNote(null);
    closeDrawer();
    redraw();
  };
  const keep = (values = {}) => {
    Object.assign(conversation, values);
    saveConversation(conversation).then((isKept) => !isKept && say(t("chat.full")));
    redraw();
  };
  const ask = () => { say(""); start(conversation); redraw(); };
  const send = (content, images, files) => {
    conversation.title ||= content.slice(0, 60) || files[0]?.name || t("chat.images");
    const kept = files.map(({ name, text }) => ({ name, text }));
    keep({ messages: [...conversation.messages, { role: "user", content, ...(images.length ? { images } : {}), ...(kept.length ? { files: kept } : {}) }], updated: Date.now() });
    ask();
  };
  const acts = {
    again: (index) => { say(""); startAgain(conversation, index); redraw(); },
    onward: () => { say(""); startOnward(conversation); redraw(); },
    turn: (index, step) => keep({ messages: turned(conversation.messages, index, step) }),
    edit: (index, content) => {
      const { versions: _, ...before } = conversation.messages[index];
      const { messages, versions } = withoutTail(conversation.messages, index);
      keep({ messages: [...messages, { ...before, content, versions }], updated: Date.now() });
      ask();
    },
    branch: (index) => {
      const made = { ...newConversation(conversation.model), title: conversation.title, settings: { ...conversation.settings } };
      made.messages = structuredClone(conversation.messages.slice(0, index + 1));
      saveConversation(made);
      show(made);
    },
  };
  const editLast = () => {
    const last = [...document.querySelectorAll(".message.user .edit")].at(-1);
    last?.click();
    return Boolean(last);
  };

  return html`<div class="chat">
    <${ConversationList} current=${conversation} show=${show} close=${closeDrawer} setNote=${setNote} redraw=${redraw} />
    <section class="talk" aria-label=${t("nav.chat")}>
      <div class="bar">
        <${MenuButton} />
        <div class="heading" dir="auto" title=${conversation.title}>${conversation.title || t("chat.new")}</div>
        <${IconButton} icon="new" class="only-narrow" label=${t("chat.new")} onClick=${() => show(newConversation(conversation.model))} />
        <${IconButton} icon="options" class="toggle" label=${t("chat.options")} aria-expanded=${optionsShown} onClick=${() => showOptions(!optionsShown)} />
      </div>
      ${optionsShown && html`<${OptionsPanel} key=${conversation.id} conversation=${conversation} models=${list} change=${keep} />`}
      <${Transcript} conversation=${conversation} isRunning=${isRunning} acts=${acts} empty=${html`<${FirstLook} model=${model} canSend=${Boolean(model) && readiness.state !== "waiting"} ask=${(text) => send(text, [], [])} />`} />
      <p class="note ${note?.isGood ? "good" : ""}" role="alert">${note?.text}</p>
      ${mesh.document && !isRunning && html`<${ReadinessBar} model=${conversation.model} readiness=${readiness} />`}
      <${Composer} key=${conversation.id} conversation=${conversation} model=${model} models=${list} loaded=${loaded} isRunning=${isRunning}
        canSend=${Boolean(conversation.model) && readiness.state !== "waiting"} send=${send} change=${keep} editLast=${editLast} say=${say} stop=${() => stop(conversation.id)} />
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
