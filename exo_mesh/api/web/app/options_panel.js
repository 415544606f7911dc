// The options of a conversation: presets, system prompt and sampling.
import { apply, deletePreset, preferPreset, readPresets, savePreset } from "./presets.js";
import { IconButton } from "./icons.js";
import { html, useState } from "./ui.js";
import { t } from "./strings.js";

export function OptionsPanel({ conversation, models, change }) {
  const { settings } = conversation;
  const set = (name) => (event) => change({ settings: { ...conversation.settings, [name]: event.target.value } });
  const field = (name, step, max) => html`<label>${t(`sampling.${name}`)}
    <input type="number" min="0" max=${max} step=${step} value=${settings[name] ?? ""} placeholder=${t("sampling.default")} onInput=${set(name)} /></label>`;
  return html`<section class="options" aria-label=${t("chat.options")}>
    <${Presets} conversation=${conversation} models=${models} change=${change} />
    <label class="wide">${t("sampling.system")}<textarea rows="3" dir="auto" value=${settings.system} onInput=${set("system")}></textarea></label>
    ${field("temperature", 0.1, 2)}${field("top_p", 0.05, 1)}${field("top_k", 1)}${field("min_p", 0.05, 1)}${field("max_tokens", 1)}${field("seed", 1)}
  </section>`;
}

function Presets({ conversation, models, change }) {
  const [{ list, preferred }, setPresets] = useState(readPresets());
  const [name, setName] = useState("");
  const choose = (event) => {
    setName(event.target.value);
    const found = list.find((one) => one.name === event.target.value);
    if (!found) return;
    apply(found, conversation, models);
    change({});
  };
  const save = (event) => {
    event.preventDefault();
    const given = event.target.elements.name.value.trim().slice(0, 60);
    if (!given) return;
    setPresets(savePreset(given, conversation));
    setName(given);
    event.target.reset();
  };
  const known = list.some((one) => one.name === name);
  return html`<div class="presets wide">
    <label>${t("preset.choose")}<select value=${known ? name : ""} onChange=${choose}>
      <option value="">${t("preset.none")}</option>${list.map((one) => html`<option key=${one.name} value=${one.name}>${one.name}</option>`)}</select></label>
    ${known && html`<${IconButton} icon="trash" label=${t("preset.delete", { name })} onClick=${() => { setPresets(deletePreset(name)); setName(""); }} />
      <label class="check"><input type="checkbox" checked=${preferred === name} onChange=${(event) => setPresets(preferPreset(event.target.checked ? name : ""))} /> ${t("preset.prefer")}</label>`}
    <form class="save" onSubmit=${save}><label>${t("preset.name")}<input name="name" maxlength="60" /></label><button type="submit">${t("preset.save")}</button></form>
  </div>`;
}
