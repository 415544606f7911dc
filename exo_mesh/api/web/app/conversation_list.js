// The conversations of this browser beside the chat: by date, with search, and a menu for each.
import { byDate, deleteConversation, exported, importConversations, listConversations, markdownOf, newConversation, saveConversation, search } from "./conversations.js";
import { Icon, IconButton } from "./icons.js";
import { Menu } from "./menu.js";
import { Sure } from "./parts.js";
import { stop } from "./running.js";
import { html, useLayoutEffect, useMemo, useRef, useState } from "./ui.js";
import { t } from "./strings.js";

const SHOWN = 200; // rows at first; more with a button, so that a long history costs nothing

export function ConversationList({ current, show, close, setNote, redraw }) {
  const [words, setWords] = useState("");
  const [most, setMost] = useState(SHOWN);
  const [row, setRow] = useState({ id: "", what: "" }); // the row that is renamed or deleted
  const file = useRef(null);
  const all = listConversations();
  const found = useMemo(() => search(words), [words, all]);
  const groups = useMemo(() => byDate(found.slice(0, most), Date.now()), [found, most]);
  const change = (one, values) => { saveConversation(Object.assign(one, values)); setRow({ id: "", what: "" }); redraw(); };
  const remove = (one) => {
    stop(one.id);
    deleteConversation(one.id);
    setRow({ id: "", what: "" });
    if (one.id === current.id) show(null);
    else redraw();
  };
  const upload = async (event) => {
    const [given] = event.target.files;
    event.target.value = "";
    try {
      setNote({ text: t("chat.imported", { n: await importConversations(await given.text()) }), isGood: true });
    } catch {
      setNote({ text: t("chat.notImported") });
    }
    redraw();
  };
  const actions = (one) => [
    { icon: "pin", label: t(one.pinned ? "chat.unpin" : "chat.pin"), act: () => change(one, { pinned: !one.pinned }) },
    { icon: "edit", label: t("chat.rename"), act: () => setRow({ id: one.id, what: "rename" }) },
    { icon: "download", label: t("chat.exportMarkdown"), act: () => download(`${fileName(one)}.md`, "text/markdown", markdownOf(one, { user: t("chat.you"), model: t("chat.model") })) },
    { icon: "download", label: t("chat.exportJson"), act: () => download(`${fileName(one)}.json`, "application/json", exported([one])) },
    { icon: "trash", label: t("chat.remove"), danger: true, act: () => setRow({ id: one.id, what: "delete" }) },
  ];
  return html`<aside class="conversations" aria-label=${t("chat.list")}>
    <div class="list-head">
      <button type="button" class="new" onClick=${() => show(newConversation(current.model))}><${Icon} name="new" />${t("chat.new")}</button>
      <${Menu} label=${t("chat.all")} items=${[
        { icon: "download", label: t("chat.export"), act: () => download("exo-mesh-conversations.json", "application/json", exported(listConversations())) },
        { icon: "upload", label: t("chat.import"), act: () => file.current.click() },
      ]} />
      <${IconButton} icon="close" class="only-narrow" label=${t("nav.close")} onClick=${close} />
      <input ref=${file} class="import" type="file" accept="application/json" hidden onChange=${upload} />
    </div>
    <label class="search"><span class="hidden">${t("chat.search")}</span><${Icon} name="search" />
      <input type="search" value=${words} placeholder=${t("chat.search")} onInput=${(event) => setWords(event.target.value)} /></label>
    <div class="list">
      ${!found.length && html`<p class="quiet">${t(words ? "chat.nothingFound" : "chat.noneYet")}</p>`}
      ${groups.map(([name, list]) => html`<section key=${name}><h2>${t(`date.${name}`)}</h2><ul>${list.map((one) => html`<${Row} key=${one.id}
        one=${one} title=${one.title} pinned=${one.pinned} isRunning=${Boolean(one.running)} isCurrent=${one.id === current.id} what=${row.id === one.id ? row.what : ""} actions=${actions}
        show=${show} change=${change} remove=${remove} leave=${() => setRow({ id: "", what: "" })} />`)}</ul></section>`)}
      ${found.length > most && html`<button type="button" class="more" onClick=${() => setMost(most + SHOWN)}>${t("chat.more", { n: found.length - most })}</button>`}
    </div>
  </aside>`;
}

function Row({ one, isCurrent, what, actions, show, change, remove, leave }) {
  const title = one.title || t("chat.untitled");
  if (what === "rename") return html`<li class="current"><${Rename} title=${one.title} save=${(name) => change(one, { title: name })} leave=${leave} /></li>`;
  if (what === "delete") {
    return html`<li class="asks"><${Sure} label=${t("chat.remove")} question=${t("chat.sure", { title })} asked no=${leave} act=${() => remove(one)} /></li>`;
  }
  return html`<li class=${isCurrent ? "current" : ""}>
    <button type="button" class="title" title=${title} aria-current=${isCurrent ? "true" : undefined} onClick=${() => show(one)}>
      ${one.running && html`<span class="spinner" role="img" aria-label=${t("chat.answering")}></span>`}<span dir="auto">${title}</span></button>
    <${Menu} label=${t("chat.actions", { title })} items=${actions(one)} /></li>`;
}

function Rename({ title, save, leave }) {
  const field = useRef(null);
  useLayoutEffect(() => field.current.select(), []);
  const submit = (event) => { event.preventDefault(); save(field.current.value.trim().slice(0, 200)); };
  const pressed = (event) => { if (event.key === "Escape") { event.preventDefault(); leave(); } };
  return html`<form class="rename" onSubmit=${submit} onKeyDown=${pressed}><input ref=${field} aria-label=${t("chat.title")} value=${title} /></form>`;
}

const fileName = (one) => (one.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60);

function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
