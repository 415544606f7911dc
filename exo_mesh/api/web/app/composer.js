// The message field. Enter sends, Shift+Enter begins a line, and the up key in an empty field edits the last message.
// Where the model takes images, they are chosen, pasted or dropped.
import { MOST_IMAGES, dataUrlOf, imageFiles } from "./pictures.js";
import { html, useEffect, useRef, useState } from "./ui.js";
import { t } from "./strings.js";

export function Composer({ draft, draftImages, isRunning, canSend, canShow, send, editLast, stop, say }) {
  const [text, setText] = useState(draft);
  const [images, setImages] = useState(draftImages);
  const field = useRef(null);
  const file = useRef(null);
  useEffect(() => { if (matchMedia("(pointer: fine)").matches) field.current.focus(); }, []);
  useEffect(() => {
    field.current.style.height = "auto";
    field.current.style.height = `${Math.min(field.current.scrollHeight + 2, 240)}px`;
  }, [text]);
  const isEmpty = !text.trim() && !images.length;
  const submit = (event) => {
    event.preventDefault();
    if (isRunning || !canSend || isEmpty) return;
    if (images.length && !canShow) return say(t("chat.noImages"));
    send(text.trim(), images);
    setText("");
    setImages([]);
  };
  const pressed = (event) => {
    if (event.key === "ArrowUp" && !text) editLast();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  const add = async (files) => {
    if (!canShow) return say(t("chat.noImages"));
    try {
      const made = await Promise.all(files.slice(0, MOST_IMAGES).map(dataUrlOf));
      setImages((before) => [...before, ...made].slice(0, MOST_IMAGES));
    } catch {
      say(t("chat.noImageFile"));
    }
  };
  const given = (event, files) => {
    if (!files.length) return;
    event.preventDefault();
    add(files);
  };
  return html`<form class="composer" onSubmit=${submit} onDragOver=${(event) => event.preventDefault()}
      onDrop=${(event) => given(event, imageFiles(event.dataTransfer?.files))}>
    ${images.length > 0 && html`<ul class="images" aria-label=${t("chat.images")}>${images.map((url, index) => html`<li key=${index}>
      <img src=${url} alt=${t("chat.imageNumber", { n: index + 1 })} />
      <button type="button" aria-label=${t("chat.removeImage", { n: index + 1 })} onClick=${() => setImages(images.filter((_, place) => place !== index))}>×</button></li>`)}</ul>`}
    ${canShow && html`<button type="button" aria-label=${t("chat.addImage")} title=${t("chat.addImage")} onClick=${() => file.current.click()}>＋</button>
      <input ref=${file} type="file" accept="image/*" multiple hidden onChange=${(event) => { add(imageFiles(event.target.files)); event.target.value = ""; }} />`}
    <label><span class="hidden">${t("chat.write")}</span>
      <textarea ref=${field} rows="1" value=${text} placeholder=${t("chat.write")} onInput=${(event) => setText(event.target.value)} onKeyDown=${pressed}
        onPaste=${(event) => given(event, imageFiles(event.clipboardData?.files))}></textarea></label>
    ${isRunning
      ? html`<button type="button" class="stop" onClick=${stop}>${t("chat.stop")}</button>`
      : html`<button type="submit" class="primary" disabled=${!canSend || isEmpty}>${t("chat.send")}</button>`}
  </form>`;
}
