// The frame of the page: navigation, connection, key prompt, theme and language. Each view has its own file.
import { ChatView } from "./chat.js";
import { KeyPrompt } from "./key_prompt.js";
import { MeshView } from "./mesh_view.js";
import { ModelsView } from "./models_view.js";
import { RequestsView } from "./requests_view.js";
import { follow, mesh, onMesh, openSession } from "./mesh.js";
import { resume } from "./running.js";
import { SettingsView } from "./settings_view.js";
import { LANGUAGES, chooseLanguage, language, loadStrings, t } from "./strings.js";
import { THEMES, applyTheme, chooseTheme, theme } from "./theme.js";
import { html, render, useEffect, useLayoutEffect, useReducer, useState } from "./ui.js";

const VIEWS = { chat: ChatView, mesh: MeshView, models: ModelsView, requests: RequestsView, settings: SettingsView };
const ICONS = {
  chat: "M4 5h16v11H9l-5 4z",
  mesh: "M12 3a3 3 0 1 1 0 6 3 3 0 0 1 0-6M5 15a3 3 0 1 1 0 6 3 3 0 0 1 0-6M19 15a3 3 0 1 1 0 6 3 3 0 0 1 0-6M10 9 7 15M14 9l3 6M8 18h8",
  models: "M12 3l8 4-8 4-8-4zM4 12l8 4 8-4M4 17l8 4 8-4",
  requests: "M4 19V9M10 19V5M16 19v-7M21 19H3",
  settings: "M4 7h9M17 7h3M13 4.5v5M4 17h3M11 17h9M11 14.5v5",
};
function viewInAddress() {
  const name = location.hash.replace("#/", "");
  return name in VIEWS ? name : "chat";
}

function App() {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const [view, setView] = useState(viewInAddress());
  useLayoutEffect(() => onMesh(redraw), []); // registers before the first answer of a node can arrive
  useEffect(() => {
    const turn = () => setView(viewInAddress());
    addEventListener("hashchange", turn);
    addEventListener("exo-preferences", redraw);
    return () => {
      removeEventListener("hashchange", turn);
      removeEventListener("exo-preferences", redraw);
    };
  }, []);
  const nextTheme = () => chooseTheme(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
  const choose = (event) => chooseLanguage(event.target.value);
  const View = VIEWS[view];
  useEffect(() => { document.title = `${t(`nav.${view}`)} · exo-mesh`; }, [view, language]);
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>${t("nav.skip")}</a>
    <header class="side">
      <div class="brand"><${Mark} /><span>exo-mesh</span></div>
      <nav aria-label=${t("nav.label")}>
        ${Object.keys(VIEWS).map((name) => html`
          <a href="#/${name}" key=${name} aria-current=${name === view ? "page" : undefined}>
            <svg viewBox="0 0 24 24" aria-hidden="true"><path d=${ICONS[name]} /></svg><span>${t(`nav.${name}`)}</span>
          </a>`)}
      </nav>
      <div class="side-foot">
        <${Connection} />
        <div class="choices">
          <button type="button" onClick=${nextTheme}>${t(`theme.${theme()}`)}</button>
          <select aria-label=${t("nav.language")} value=${language} onChange=${choose}>
            ${Object.entries(LANGUAGES).map(([name, label]) => html`<option key=${name} value=${name}>${label}</option>`)}
          </select>
        </div>
      </div>
    </header>
    <main id="main" tabindex="-1" class="view-${view}"><${View} /></main>
    ${mesh.needsKey && html`<${KeyPrompt} />`}`;
}

function Mark() {
  return html`<svg class="mark" viewBox="0 0 32 32" aria-hidden="true">
    <circle cx="16" cy="16" r="10" /><circle class="dot" cx="16" cy="6" r="4" />
    <circle class="dot" cx="7.5" cy="21" r="4" /><circle class="hot" cx="24.5" cy="21" r="4" /></svg>`;
}

/** Shows the node that answers, its health, and the rights of this caller. */
function Connection() {
  const { document: live, hello, connected, base } = mesh;
  const peer = live?.peers?.[live.node_id];
  const level = connected ? live?.health?.level ?? "ok" : "failed";
  const moved = base !== location.origin;
  return html`<div class="connection" role="status">
    <span class="dot level-${level}" aria-hidden="true"></span>
    <div>
      <div>${connected ? peer?.name ?? base : t("connection.lost")}</div>
      <small>${connected && moved ? t("connection.moved", { base: base.replace(/^https?:\/\//, "") }) : ""}</small>
      ${hello && html`<small class="caller">${t(`caller.${hello.caller.role === "admin" ? "admin" : "use"}`)}</small>`}
    </div>
  </div>`;
}

applyTheme();
await loadStrings();
const place = document.getElementById("app");
place.textContent = "";
render(html`<${App} />`, place);
await openSession(); // before anything is asked, so that each answer belongs to the session
follow();
resume();
