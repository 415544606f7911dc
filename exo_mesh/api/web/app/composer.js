// The card for the next message: text and files above; below them model, thinking, files, tools, context, and send.
// Enter sends, Shift+Enter begins a line, and the up key in an empty field edits the last message.
import { FileError, MOST_FILES, textFileOf } from "./attachments.js";
import { ContextRing } from "./context_ring.js";
import { contextLimit, tokensOf } from "./context_use.js";
import { Icon, IconButton } from "./icons.js";
import { mesh } from "./mesh.js";
import { ModelPicker } from "./model_picker.js";
import { MOST_IMAGES, dataUrlOf, takesImages } from "./pictures.js";
import { thinkingChoices } from "./thinking.js";
import { offeredTools, takesTools } from "./web_tools.js";
import { html, useEffect, useRef, useState } from "./ui.js";
import { t } from "./strings.js";

const drafts = new Map(); // conversation id → {text, images, files}: kept while another conversation is shown

export function Composer({ conversation, model, models, loaded, isRunning, canSend, send, change, editLast, stop, say }) {
  const [draft, setDraft] = useState(drafts.get(conversation.id) ?? { text: "", images: [], files: [] });
  const [isOver, setOver] = useState(false);
  const field = useRef(null);
  const { text, images, files } = draft;
  const put = (made) => setDraft((before) => {
    const next = { ...before, ...made(before) };
    drafts.set(conversation.id, next);
    return next;
  });
  useEffect(() => { if (matchMedia("(pointer: fine)").matches) field.current.focus(); }, []);
  useEffect(() => {
    field.current.style.height = "auto";
    field.current.style.height = `${Math.min(field.current.scrollHeight, 260)}px`;
  }, [text]);
  const isEmpty = !text.trim() && !images.length && !files.length;
  const submit = (event) => {
    event.preventDefault();
    if (isRunning || !canSend || isEmpty) return;
    if (images.length && !takesImages(model)) return say(t("chat.noImages"));
    send(text.trim(), images, files);
    put(() => ({ text: "", images: [], files: [] }));
  };
  const pressed = (event) => {
    if (event.key === "ArrowUp" && !text && editLast()) event.preventDefault();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  const add = async (given) => {
    say("");
    const pictures = given.filter((file) => file.type.startsWith("image/") && file.type !== "image/svg+xml");
    if (pictures.length && !takesImages(model)) say(t("chat.noImages"));
    else await addImages(pictures, put, say);
    await addFiles(given.filter((file) => !pictures.includes(file)), put, say);
  };
  const given = (event, list) => {
    setOver(false);
    if (!list?.length) return;
    event.preventDefault();
    add([...list]);
  };
  return html`<form class="composer ${isOver ? "over" : ""}" onSubmit=${submit} onDrop=${(event) => given(event, event.dataTransfer?.files)}
      onDragOver=${(event) => { event.preventDefault(); setOver(true); }} onDragLeave=${() => setOver(false)}>
    <${Attached} images=${images} files=${files} put=${put} />
    <label class="field"><span class="hidden">${t("chat.write")}</span>
      <textarea ref=${field} rows="1" dir="auto" value=${text} placeholder=${t("chat.write")} onInput=${(event) => { const { value } = event.target; put(() => ({ text: value })); }} onKeyDown=${pressed}
        onPaste=${(event) => given(event, event.clipboardData?.files)}></textarea></label>
    <div class="tools">
      <${Attach} add=${add} />
      <${ModelPicker} model=${conversation.model} models=${models} loaded=${loaded} isRunning=${isRunning} choose=${(id) => change({ model: id })} />
      <${Thinking} conversation=${conversation} model=${model} change=${change} />
      <${WebTools} conversation=${conversation} model=${model} change=${change} />
      <span class="space"></span>
      <${ContextRing} used=${tokensOf(conversation.messages, text + files.map((one) => one.text).join(""))} limit=${contextLimit(model, mesh.document)} />
      ${isRunning ? html`<${IconButton} icon="stop" class="round stop" label=${t("chat.stop")} onClick=${stop} />`
        : html`<button type="submit" class="icon-button round primary" aria-label=${t("chat.send")} title=${t("chat.send")} disabled=${!canSend || isEmpty}><${Icon} name="send" /></button>`}
    </div>
  </form>`;
}

async function addImages(pictures, put, say) {
  try {
    const made = await Promise.all(pictures.slice(0, MOST_IMAGES).map(dataUrlOf));
    if (made.length) put(({ images }) => ({ images: [...images, ...made].slice(0, MOST_IMAGES) }));
  } catch {
    say(t("chat.noImageFile"));
  }
}

async function addFiles(list, put, say) {
  for (const file of list.slice(0, MOST_FILES)) {
    const waits = { name: file.name, text: "", isRead: false };
    put(({ files }) => ({ files: [...files, waits].slice(0, MOST_FILES) }));
    try {
      const read = { ...(await textFileOf(file)), isRead: true };
      if (!read.text.trim()) throw new FileError("files.empty", file.name);
      if (read.isCut) say(t("files.cut", { name: file.name }));
      put(({ files }) => ({ files: files.map((one) => (one === waits ? read : one)) }));
    } catch (error) {
      put(({ files }) => ({ files: files.filter((one) => one !== waits) }));
      say(error instanceof FileError ? t(error.key, { name: file.name }) : `${file.name}: ${error.message}`);
    }
  }
}

/** What goes with the message, each with a button to remove it. */
function Attached({ images, files, put }) {
  if (!images.length && !files.length) return null;
  return html`<ul class="attached" aria-label=${t("files.attached")}>
    ${images.map((url, index) => html`<li class="image" key=${`i${index}`}><img src=${url} alt=${t("chat.imageNumber", { n: index + 1 })} />
      <${IconButton} icon="close" label=${t("chat.removeImage", { n: index + 1 })} onClick=${() => put((now) => ({ images: now.images.filter((_, place) => place !== index) }))} /></li>`)}
    ${files.map((one, index) => html`<li class="file" key=${`f${index}`}>${one.isRead ? html`<${Icon} name="file" />` : html`<span class="spinner" role="img" aria-label=${t("files.reading")}></span>`}<span>${one.name}</span>
      <${IconButton} icon="close" label=${t("files.remove", { name: one.name })} onClick=${() => put((now) => ({ files: now.files.filter((other) => other !== one) }))} /></li>`)}
  </ul>`;
}

function Attach({ add }) {
  const file = useRef(null);
  return html`<${IconButton} icon="attach" label=${t("files.attach")} onClick=${() => file.current.click()} />
    <input ref=${file} class="attach" type="file" multiple hidden onChange=${(event) => { add([...event.target.files]); event.target.value = ""; }} />`;
}

function Thinking({ conversation, model, change }) {
  const choices = thinkingChoices(model);
  if (!choices.length) return null;
  const { settings } = conversation;
  const value = choices.includes(settings.thinking) ? settings.thinking : "";
  return html`<label class="thinking chip ${value ? "is-set" : ""}" title=${t("thinking.label")}><span class="hidden">${t("thinking.label")}</span><${Icon} name="think" />
    <select value=${value} onChange=${(event) => change({ settings: { ...settings, thinking: event.target.value } })}>
      ${choices.map((one) => html`<option key=${one} value=${one}>${t(`thinking.${one || "auto"}`)}</option>`)}</select></label>`;
}

function WebTools({ conversation, model, change }) {
  if (!offeredTools().length || !takesTools(model)) return null;
  const { settings } = conversation;
  return html`<${IconButton} icon="globe" class="toggle" label=${t("chat.web")} aria-pressed=${Boolean(settings.web)} onClick=${() => change({ settings: { ...settings, web: !settings.web } })} />`;
}
