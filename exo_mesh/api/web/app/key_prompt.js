// Asks for an API key if the mesh is closed. The key stays in this tab.
import { mesh, nameOf, setKey } from "./mesh.js";
import { html, useEffect, useRef } from "./ui.js";
import { t } from "./strings.js";

export function KeyPrompt() {
  const dialog = useRef(null);
  const field = useRef(null);
  useEffect(() => { dialog.current.showModal(); }, []);
  const submit = (event) => {
    event.preventDefault();
    if (field.current.value.trim()) setKey(field.current.value);
  };
  return html`<dialog ref=${dialog} class="key-prompt" aria-labelledby="key-title" onCancel=${(event) => event.preventDefault()}>
    <form onSubmit=${submit}>
      <h2 id="key-title">${t("key.title")}</h2>
      <p>${mesh.left && mesh.left !== nameOf(mesh.base) ? t("key.moved", { left: mesh.left, name: nameOf(mesh.base) }) : t("key.why", { base: mesh.base.replace(/^https?:\/\//, "") })}</p>
      <p><code>exo-mesh key new</code></p>
      <label>${t("key.label")}<input ref=${field} type="password" autocomplete="off" required /></label>
      ${mesh.keyRefused && html`<p class="error" role="alert">${t("key.refused")}</p>`}
      <p class="quiet">${t("key.kept")}</p>
      <button class="primary" type="submit">${t("key.use")}</button>
    </form>
  </dialog>`;
}
