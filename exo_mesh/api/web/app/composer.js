// The message field. Enter sends, Shift+Enter begins a line, and the up key in an empty field edits the last message.
import { html, useEffect, useRef, useState } from "./ui.js";
import { t } from "./strings.js";

export function Composer({ draft, isRunning, canSend, send, editLast, stop }) {
  const [text, setText] = useState(draft);
  const field = useRef(null);
  useEffect(() => { if (matchMedia("(pointer: fine)").matches) field.current.focus(); }, []);
  useEffect(() => {
    field.current.style.height = "auto";
    field.current.style.height = `${Math.min(field.current.scrollHeight + 2, 240)}px`;
  }, [text]);
  const submit = (event) => {
    event.preventDefault();
    if (isRunning || !canSend || !text.trim()) return;
    send(text.trim());
    setText("");
  };
  const pressed = (event) => {
    if (event.key === "ArrowUp" && !text) editLast();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  return html`<form class="composer" onSubmit=${submit}>
    <label><span class="hidden">${t("chat.write")}</span>
      <textarea ref=${field} rows="1" value=${text} placeholder=${t("chat.write")} onInput=${(event) => setText(event.target.value)} onKeyDown=${pressed}></textarea></label>
    ${isRunning
      ? html`<button type="button" class="stop" onClick=${stop}>${t("chat.stop")}</button>`
      : html`<button type="submit" class="primary" disabled=${!canSend || !text.trim()}>${t("chat.send")}</button>`}
  </form>`;
}
