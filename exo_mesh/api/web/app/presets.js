// Presets: a system prompt, sampling and a model under a name, kept in this browser.
const MOST = 50;

/** {list: [{name, model, settings}], preferred: the name of the one that new conversations begin with, or ""} */
export function readPresets() {
  try {
    const { list, preferred } = JSON.parse(localStorage.getItem("exo.presets"));
    return { list: list.filter((one) => typeof one?.name === "string" && one.settings), preferred: String(preferred ?? "") };
  } catch {
    return { list: [], preferred: "" };
  }
}

function write(presets) {
  localStorage.setItem("exo.presets", JSON.stringify(presets));
  return presets;
}

export function savePreset(name, { model, settings }) {
  const { list, preferred } = readPresets();
  return write({ list: [...list.filter((one) => one.name !== name), { name, model, settings }].slice(-MOST), preferred });
}

export function deletePreset(name) {
  const { list, preferred } = readPresets();
  return write({ list: list.filter((one) => one.name !== name), preferred: preferred === name ? "" : preferred });
}

export function preferPreset(name) {
  return write({ ...readPresets(), preferred: name });
}

/** Applies a preset to a conversation; a model that the mesh no longer has is left as it is. */
export function apply({ model, settings }, conversation, models) {
  Object.assign(conversation, { settings: { ...conversation.settings, ...settings } });
  if (model && models.some((one) => one.id === model)) conversation.model = model;
}
