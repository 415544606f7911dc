// API keys: create, list and revoke them. A new key is shown only once.
import { clock } from "./format.js";
import { call, mesh } from "./mesh.js";
import { CopyLine } from "./settings_parts.js";
import { html, useEffect, useState } from "./ui.js";
import { t } from "./strings.js";

export function Keys({ may }) {
  const [found, setFound] = useState(null);
  const [made, setMade] = useState(null);
  const [role, setRole] = useState("use");
  const [name, setName] = useState("");
  const [note, setNote] = useState("");
  const [sure, setSure] = useState("");
  const reload = () => call("/v1/keys").then(setFound, (error) => setNote(error.message));
  useEffect(() => {
    setFound(null);
    if (may) reload();
  }, [may, mesh.base]);
  const act = async (path, options) => {
    setNote("");
    try {
      return await call(path, options);
    } catch (error) {
      setNote(error.message);
      return null;
    } finally {
      reload();
    }
  };
  const make = async (event) => {
    event.preventDefault();
    setMade(await act("/v1/keys", { method: "POST", body: { role, name: name.trim() } }));
    setName("");
  };
  const revoke = (id) => {
    if (sure !== id) return setSure(id);
    setSure("");
    return act(`/v1/keys/${id}`, { method: "DELETE" });
  };
  return html`<section class="card"><h2>${t("keys.title")}</h2>
    <p class="quiet">${t(found?.scope === "node" ? "keys.noteNode" : "keys.noteMesh")}</p>
    <p class="note" role="alert">${note}</p>
    <form class="row" onSubmit=${make}>
      <label>${t("keys.role")} <select value=${role} disabled=${!may} onChange=${(event) => setRole(event.target.value)}>
        ${["use", "admin"].map((name) => html`<option key=${name} value=${name}>${t(`role.${name}`)}</option>`)}</select></label>
      <label>${t("keys.name")} <input value=${name} maxlength="40" disabled=${!may} onInput=${(event) => setName(event.target.value)} /></label>
      <button type="submit" disabled=${!may}>${t("keys.make")}</button>
    </form>
    <div role="status">${made && html`<p>${t("keys.once")}</p><${CopyLine} text=${made.key} />`}</div>
    ${found && (found.data.length ? html`<ul class="plain-list">${found.data.map((key) => html`<li class="item" key=${key.id}>
      <div><code>${key.id}</code> ${key.name && html`<strong>${key.name}</strong> `}<span class="pill">${key.role}</span> <span class="quiet">${key.until ? t("keys.session", { until: clock(Date.parse(key.until) / 1000) }) : key.created}</span>
        ${key.is_yours && html` <span class="pill">${t("keys.yours")}</span>`}</div>
      <button type="button" class="danger" disabled=${!may} onBlur=${() => setSure("")} onClick=${() => revoke(key.id)}>${t(sure === key.id ? "keys.sure" : "keys.revoke")}</button>
    </li>`)}</ul>` : html`<p class="quiet">${t("keys.none")}</p>`)}
  </section>`;
}
