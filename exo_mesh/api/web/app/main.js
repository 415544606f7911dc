// The frame of the page: navigation, connection, key prompt. Each view has its own file.
import { ChatView } from "./chat.js";
import { openConversations } from "./conversations.js";
import { MenuButton, closeDrawer } from "./drawer.js";
import { Icon } from "./icons.js";
import { KeyPrompt } from "./key_prompt.js";
import { bases, follow, mesh, nameOf, onMesh, openSession } from "./mesh.js";
import { resume } from "./running.js";
import { language, loadStrings, t } from "./strings.js";
import { applyTheme } from "./theme.js";
import { html, render, useEffect, useLayoutEffect, useReducer, useState } from "./ui.js";

const VIEWS = ["chat", "mesh", "models", "requests", "settings"];
/** The views that are loaded when the chat is shown: the first load stays small, and a page whose node dies has them. */
const LATER = {
  mesh: () => import("./mesh_view.js").then((module) => module.MeshView),
  models: () => import("./models_view.js").then((module) => module.ModelsView),
  requests: () => import("./requests_view.js").then((module) => module.RequestsView),
  settings: () => import("./settings_view.js").then((module) => module.SettingsView),
};
const loaded = { chat: ChatView };
const loading = {};

const RETRY_MS = 1000;

/** Loads a view once; tries again after a failure, while the view is to be shown. */
function loadView(name) {
  loading[name] ??= LATER[name]().then((view) => {
    loaded[name] = view;
    dispatchEvent(new Event("exo-preferences"));
  }, () => {
    delete loading[name];
    setTimeout(() => viewInAddress() === name && loadView(name), RETRY_MS);
  });
}

function viewInAddress() {
  const name = location.hash.replace("#/", "");
  return VIEWS.includes(name) ? name : "chat";
}

function App() {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const [view, setView] = useState(viewInAddress());
  useLayoutEffect(() => onMesh(redraw), []); // registers before the first answer of a node can arrive
  useEffect(() => {
    const turn = () => { closeDrawer(); setView(viewInAddress()); };
    addEventListener("hashchange", turn);
    addEventListener("exo-preferences", redraw);
    return () => {
      removeEventListener("hashchange", turn);
      removeEventListener("exo-preferences", redraw);
    };
  }, []);
  const View = loaded[view];
  useEffect(() => { if (!loaded[view]) loadView(view); }, [view]);
  useEffect(() => { document.title = `${t(`nav.${view}`)} · exo-mesh`; }, [view, language]);
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>${t("nav.skip")}</a>
    <header class="side">
      <${Mark} />
      <nav aria-label=${t("nav.label")}>
        ${VIEWS.map((name) => html`
          <a href="#/${name}" key=${name} aria-current=${name === view ? "page" : undefined} onClick=${closeDrawer}><${Icon} name=${name} /><span>${t(`nav.${name}`)}</span></a>`)}
      </nav>
      <${Connection} />
    </header>
    <div class="scrim" onClick=${closeDrawer}></div>
    <main id="main" tabindex="-1" class="view-${view}">
      <${Gone} />
      ${view !== "chat" && html`<div class="bar only-narrow"><${MenuButton} /><div class="heading">${t(`nav.${view}`)}</div></div>`}
      ${View ? html`<${View} />` : html`<p class="page quiet" role="status">${t("nav.loading")}</p>`}
    </main>
    ${mesh.needsKey && html`<${KeyPrompt} />`}`;
}

function Mark() {
  return html`<svg class="mark" viewBox="0 0 32 32" aria-hidden="true">
    <circle cx="16" cy="16" r="10" /><circle class="dot" cx="16" cy="6" r="4" />
    <circle class="dot" cx="7.5" cy="21" r="4" /><circle class="hot" cx="24.5" cy="21" r="4" /></svg>`;
}

/** Says that no node answers: the page began without one, from the files that the browser keeps. */
function Gone() {
  if (mesh.connected || mesh.document || mesh.misses < bases().length) return null;
  return html`<p class="gone" role="alert">${t("connection.gone", { names: [...new Set(bases().map(nameOf))].sort().join(", ") })}</p>`;
}

/** Shows the node that answers, its health, and the rights of this caller. */
function Connection() {
  const { document: live, hello, connected, base } = mesh;
  const peer = live?.peers?.[live.node_id];
  const level = connected ? live?.health?.level ?? "ok" : "failed";
  const name = connected ? peer?.name ?? base : t("connection.lost");
  const moved = connected && base !== location.origin ? t("connection.moved", { base: base.replace(/^https?:\/\//, "") }) : "";
  const rights = hello ? t(`caller.${hello.caller.role === "admin" ? "admin" : "use"}`) : "";
  return html`<div class="connection" role="status" title=${[name, moved, rights].filter(Boolean).join(" · ")}>
    <span class="dot level-${level}" aria-hidden="true"></span><span class="name">${name}</span>
    ${moved && html`<small>${moved}</small>`}${rights && html`<small class="caller">${rights}</small>`}
  </div>`;
}

applyTheme();
await Promise.all([loadStrings(), openConversations()]);
const place = document.getElementById("app");
place.textContent = "";
render(html`<${App} />`, place);
await openSession(); // before anything is asked, so that each answer belongs to the session
follow();
resume();
for (const name of Object.keys(LATER)) loadView(name);
navigator.serviceWorker?.register("/service-worker.js").catch(() => {}); // there is none over plain HTTP, but on localhost
