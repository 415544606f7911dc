// Shows a JSON document of a node unchanged, or saves it as a file.
import { html, useState } from "./ui.js";
import { t } from "./strings.js";

const MOST_CHARS = 200_000; // a browser cannot lay out much more text at once

export function save(name, value) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value)], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  URL.revokeObjectURL(url);
}

/** read: fetches the document when the user opens it. */
export function Raw({ read, name, label = t("raw.open") }) {
  const [value, setValue] = useState(null);
  const [note, setNote] = useState("");
  const open = async (event) => {
    if (!event.currentTarget.open || value !== null) return;
    setNote(t("raw.reading"));
    try {
      setValue(await read());
      setNote("");
    } catch (error) {
      setNote(error.message);
    }
  };
  const text = value === null ? "" : JSON.stringify(value, null, 1);
  return html`<details class="raw" onToggle=${open}><summary>${label}</summary>
    <p class="note" role="status">${note}</p>
    ${value !== null && html`<button type="button" onClick=${() => save(name, value)}>${t("raw.save")}</button>
      <pre tabindex="0">${text.slice(0, MOST_CHARS)}${text.length > MOST_CHARS ? "\n…" : ""}</pre>`}
  </details>`;
}
