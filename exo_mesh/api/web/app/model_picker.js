// The choice of a model in the composer: a button that opens a list with search, which says where a model that is not
// loaded would fit.
import { fitOf, fitText, sizeText } from "./fitting.js";
import { Icon } from "./icons.js";
import { mesh } from "./mesh.js";
import { html, useLayoutEffect, useRef, useState } from "./ui.js";
import { t } from "./strings.js";

const READY = new Set(["loaded", "served"]);

/** The groups of a list of models that contain each word: [[name of a text, rows]], without empty ones. A row: {model,
 * facts, fits}; it does not fit if the mesh has too little memory for a model that is not loaded. */
export function choices(models, words, peers) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const found = models.filter((one) => wanted.every((word) => one.id.toLowerCase().includes(word))).map((model) => {
    if (READY.has(model.status)) return { model, facts: "", fits: true };
    const fit = fitOf(model, peers), size = model.num_bytes > 1 ? sizeText(model) : "";
    return { model, facts: [size, fitText(fit)].filter(Boolean).join(" · "), fits: fit?.kind !== "no" };
  });
  const ready = found.filter(({ model }) => READY.has(model.status)), rest = found.filter(({ model }) => !READY.has(model.status));
  return [["chat.ready", ready], ["chat.onDisk", [...rest.filter(({ fits }) => fits), ...rest.filter(({ fits }) => !fits)]]].filter(([, list]) => list.length);
}

export function ModelPicker({ model, models, loaded, isRunning, choose }) {
  const [isOpen, open] = useState(false);
  const place = useRef(null);
  const close = () => { open(false); place.current?.querySelector("button").focus(); };
  const isKnown = models.some((one) => one.id === model);
  const name = model || t(loaded ? "chat.noModel" : "chat.looking");
  return html`<div class="model-choice chip" ref=${place}>
    <button type="button" class="chosen" value=${model} disabled=${isRunning} title=${name} aria-haspopup="dialog" aria-expanded=${isOpen ? "true" : "false"} data-known=${isKnown} onClick=${() => open(!isOpen)}>
      <span class="hidden">${t("chat.model")}: </span><span class="name">${name}</span><${Icon} name="down" /></button>
    ${isOpen && html`<${Panel} place=${place} model=${model} models=${models} choose=${(id) => { close(); choose(id); }} close=${close} leave=${() => open(false)} />`}</div>`;
}

function Panel({ place, model, models, choose, close, leave }) {
  const [words, setWords] = useState("");
  const groups = choices(models, words, mesh.document?.peers ?? {});
  const rows = groups.flatMap(([, list]) => list);
  const [pointed, point] = useState(model);
  const at = Math.max(0, rows.findIndex((one) => one.model.id === pointed));
  const field = useRef(null), list = useRef(null);
  useLayoutEffect(() => {
    field.current.focus();
    const outside = (event) => !place.current?.contains(event.target) && leave();
    addEventListener("pointerdown", outside);
    return () => removeEventListener("pointerdown", outside);
  }, []);
  useLayoutEffect(() => { list.current?.querySelector("[data-pointed]")?.scrollIntoView({ block: "nearest" }); }, [at, words]);
  const take = (row) => row?.fits && choose(row.model.id);
  const pressed = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") close();
    else if (event.target !== field.current || event.isComposing) return;
    else if (step && rows.length) point(rows[(at + step + rows.length) % rows.length].model.id);
    else if (event.key === "Enter") take(rows[at]);
    else return;
    event.preventDefault();
  };
  const keepFocus = (event) => { if (!event.target.closest("input, a")) event.preventDefault(); }; // it stays in the field
  const left = (event) => { if (event.relatedTarget && !place.current.contains(event.relatedTarget)) leave(); };
  return html`<div class="model-panel" role="dialog" aria-label=${t("chat.model")} onKeyDown=${pressed} onMouseDown=${keepFocus} onFocusOut=${left}>
    <label class="search"><span class="hidden">${t("chat.searchModel")}</span><${Icon} name="search" />
      <input ref=${field} type="text" role="combobox" aria-expanded="true" aria-controls="model-list" aria-activedescendant=${rows.length ? `model-${at}` : undefined}
        value=${words} placeholder=${t("chat.searchModel")} autocomplete="off" spellcheck="false" onInput=${(event) => setWords(event.target.value)} /></label>
    <div id="model-list" class="model-list" role="listbox" aria-label=${t("chat.model")} ref=${list}>${groups.map(([name, found]) => html`
      <div role="group" key=${name} aria-label=${t(name)}><div class="group" aria-hidden="true">${t(name)}</div>${found.map((row) => html`
        <${Row} key=${row.model.id} row=${row} index=${rows.indexOf(row)} isPointed=${rows.indexOf(row) === at} isChosen=${row.model.id === model} take=${() => take(row)} />`)}</div>`)}</div>
    ${!rows.length && html`<p class="quiet">${t("chat.noSuchModel")}</p>`}
    <a href="#/models">${t("hub.title")} …</a></div>`;
}

function Row({ row, index, isPointed, isChosen, take }) {
  return html`<div id=${`model-${index}`} class="model-row" role="option" aria-selected=${isChosen ? "true" : "false"} aria-disabled=${row.fits ? undefined : "true"} data-pointed=${isPointed || undefined} onClick=${take}>
    <span class="name">${row.model.id}${isChosen && html`<${Icon} name="check" />`}</span>${row.facts && html`<span class="facts">${row.facts}</span>`}</div>`;
}
