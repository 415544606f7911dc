// The settings view: this browser, shared settings, keys, invitations, and the whole configuration of a node.
import { percent } from "./format.js";
import { call, mayAdmin, mesh } from "./mesh.js";
import { Invite } from "./settings_invite.js";
import { Keys } from "./settings_keys.js";
import { THEMES, chooseTheme, theme } from "./theme.js";
import { html, useEffect, useState } from "./ui.js";
import { LANGUAGES, chooseLanguage, language, t } from "./strings.js";

/** The names of the shared settings in the order of the form; the kind of a setting decides its field. */
const FORM = {
  default_model: "text", default_temp: "number", max_generate_tokens: "number", system_prompt: "long",
  keep_agent_lines: "switch", placement: "choice", min_peers: "number", context_limit: "number", mixed_rings: "choice",
};

export function SettingsView() {
  const [config, setConfig] = useState(null);
  const [note, setNote] = useState("");
  const role = mesh.hello?.caller.role;
  useEffect(() => {
    let wanted = true;
    if (mesh.needsKey) return undefined;
    call("/config").then((found) => wanted && setConfig(found), (error) => wanted && setNote(error.message));
    return () => { wanted = false; };
  }, [mesh.base, role, mesh.needsKey]);
  const save = async (changes) => {
    setNote("");
    try {
      setConfig(await call("/config", { method: "PUT", body: changes }));
      return true;
    } catch (error) {
      setNote(error.message);
      return false;
    }
  };
  const may = mayAdmin();
  return html`<div class="page settings">
    <div class="head"><h1>${t("nav.settings")}</h1></div>
    ${!may && mesh.hello && html`<p class="quiet">${t("settings.readOnly")}</p>`}
    <p class="note" role="alert">${note}</p>
    <${Browser} />
    ${config && html`<${Tracing} config=${config} may=${may} save=${save} />
      <${HubToken} config=${config} may=${may} save=${save} />
      <${Shared} key=${JSON.stringify(config.mesh)} config=${config} may=${may} save=${save} />`}
    <${Keys} may=${may} />
    <${Invite} may=${may} />
    ${config && html`<${Everything} config=${config} />`}
  </div>`;
}

function Browser() {
  return html`<section class="card"><h2>${t("settings.browser")}</h2><div class="fields">
    <label>${t("settings.theme")} <select value=${theme()} onChange=${(event) => chooseTheme(event.target.value)}>
      ${THEMES.map((name) => html`<option key=${name} value=${name}>${t(`theme.${name}`)}</option>`)}</select></label>
    <label>${t("nav.language")} <select value=${language} onChange=${(event) => chooseLanguage(event.target.value)}>
      ${Object.entries(LANGUAGES).map(([name, label]) => html`<option key=${name} value=${name} lang=${name}>${label}</option>`)}</select></label>
  </div><p class="quiet">${t("settings.browserNote")}</p></section>`;
}

const valueOf = (config, name) => config.settings.find((one) => one.name === name);

function Tracing({ config, may, save }) {
  const [asked, setAsked] = useState(null); // the value that was sent to the node, until it answers
  const now = valueOf(config, "trace_sample");
  const turn = async (event) => {
    setAsked(event.target.checked);
    await save({ trace_sample: event.target.checked ? 1 : null });
    setAsked(null);
  };
  return html`<section class="card"><h2>${t("settings.tracing")}</h2>
    <label class="switch"><input type="checkbox" role="switch" checked=${asked ?? Number(now.value) === 1} disabled=${!may || asked !== null} onChange=${turn} /> ${t("settings.traceAll")}</label>
    <p class="quiet">${t("settings.traceNote", { share: percent(Number(now.value)), origin: originOf(now) })}</p></section>`;
}

/** The token for gated models; it can be set and removed, but is never shown. */
function HubToken({ config, may, save }) {
  const [text, setText] = useState("");
  const submit = async (event) => {
    event.preventDefault();
    if (await save({ hf_token: text.trim() })) setText("");
  };
  const { is_set: isSet, origin } = config.hf_token;
  return html`<form class="card" onSubmit=${submit}><h2>${t("token.title")}</h2>
    <p class="quiet">${t("token.note", { name: config.node.name })}</p>
    <div class="row"><label>${t(isSet ? "token.replace" : "token.label")}<input type="password" autocomplete="off" value=${text} disabled=${!may} onInput=${(event) => setText(event.target.value)} /></label>
      <button type="submit" disabled=${!may || !text.trim()}>${t("settings.save")}</button>
      ${isSet && html`<button type="button" class="danger" disabled=${!may} onClick=${() => save({ hf_token: null })}>${t("token.remove")}</button>`}</div>
    <p class="quiet">${isSet ? t("token.isSet", { origin }) : t("token.isNot")}</p></form>`;
}

/** The form of the shared settings. With an empty field each node uses its own value. */
function Shared({ config, may, save }) {
  const [draft, setDraft] = useState(config.mesh);
  const [busy, setBusy] = useState(false);
  const names = Object.keys(FORM).filter((name) => (draft[name] ?? "") !== (config.mesh[name] ?? ""));
  const set = (name, value) => setDraft((before) => ({ ...before, [name]: value }));
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    await save(Object.fromEntries(names.map((name) => [name, draft[name] ? draft[name] : null])));
    setBusy(false);
  };
  return html`<form class="card" onSubmit=${submit}><h2>${t("settings.shared")}</h2>
    <p class="quiet">${t("settings.sharedNote")}</p>
    <fieldset class="fields" disabled=${!may || busy}>
      ${Object.entries(FORM).map(([name, kind]) => html`
        <${Field} key=${name} name=${name} kind=${kind} value=${draft[name] ?? ""} setting=${valueOf(config, name)} change=${(value) => set(name, value)} />`)}
    </fieldset>
    <div class="row"><button class="primary" type="submit" disabled=${!may || busy || !names.length}>${t("settings.save")}</button>
      <button type="button" disabled=${busy || !names.length} onClick=${() => setDraft(config.mesh)}>${t("settings.undo")}</button></div>
  </form>`;
}

function Field({ name, kind, value, setting, change }) {
  const choices = kind === "switch" ? ["true", "false"] : setting.choices;
  const input = (event) => change(event.target.value);
  const own = setting.value || t("settings.open");
  const field = kind === "long"
    ? html`<textarea rows="3" value=${value} placeholder=${setting.value ?? ""} onInput=${input}></textarea>`
    : kind === "text" || kind === "number"
      ? html`<input value=${value} inputmode=${kind === "number" ? "decimal" : undefined} placeholder=${own} spellcheck="false" autocapitalize="off" onInput=${input} />`
      : html`<select value=${value} onChange=${input}><option value="">${t("settings.own")}</option>
          ${choices.map((choice) => html`<option key=${choice} value=${choice}>${kind === "switch" ? t(`switch.${choice}`) : choice}</option>`)}</select>`;
  return html`<label class=${kind === "long" ? "wide" : ""}>${t(`setting.${name}`)}${field}
    <small>${t("settings.inForce", { value: setting.value === null ? "***" : own.slice(0, 60), origin: originOf(setting) })}</small></label>`;
}

function originOf(setting) {
  return setting.origin === "mesh" || setting.origin === "default" ? t(`origin.${setting.origin}`) : setting.origin;
}

/** All settings of the node in use. */
function Everything({ config }) {
  const [changedOnly, setChangedOnly] = useState(true);
  const [word, setWord] = useState("");
  const rows = config.settings.filter((one) => (!changedOnly || one.origin !== "default") && one.name.includes(word.trim().toLowerCase()));
  return html`<section class="card"><h2>${t("settings.all", { name: config.node.name })}</h2>
    <p class="quiet">${t("settings.allNote", { file: config.config_file || "–" })}</p>
    <div class="fields"><label>${t("settings.find")}<input type="search" value=${word} onInput=${(event) => { setWord(event.target.value); setChangedOnly(false); }} /></label>
      <label class="switch"><input type="checkbox" checked=${changedOnly} onChange=${(event) => setChangedOnly(event.target.checked)} /> ${t("settings.changedOnly")}</label></div>
    ${rows.length ? html`<div class="scroll" tabindex="0"><table>
      <thead><tr><th>${t("settings.name")}</th><th>${t("settings.value")}</th><th>${t("settings.origin")}</th></tr></thead>
      <tbody>${rows.map((one) => html`<tr key=${one.name}><td><code>${one.name}</code><small>${one.help}</small></td>
        <td class="value">${one.value === null ? html`<span class="quiet">${t("settings.hidden")}</span>` : one.value || "–"}</td><td>${originOf(one)}</td></tr>`)}</tbody>
    </table></div>` : html`<p class="quiet">${t("settings.none")}</p>`}
  </section>`;
}
