// The frame of the page: navigation, connection, key prompt. Each view has its own file.
import { openConversations } from "./conversations.js";
import { MenuButton, closeDrawer } from "./drawer.js";
import { Icon } from "./icons.js";
import { KeyPrompt } from "./key_prompt.js";
import { follow, mesh, onMesh, openSession } from "./mesh.js";
import { resume } from "./running.js";
import { language, loadStrings, t } from "./strings.js";
import { applyTheme } from "./theme.js";
import { html, render, useEffect, useLayoutEffect, useReducer, useState } from "./ui.js";
import { VIEW_NAMES, fetchViews, viewOf } from "./views.js";

function viewInAddress() {
  const name = location.hash.replace("#/", "");
  return VIEW_NAMES.includes(name) ? name : "chat";
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
  const View = viewOf(view, redraw);
  useEffect(() => { document.title = `${t(`nav.${view}`)} · exo-mesh`; }, [view, language]);
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>${t("nav.skip")}</a>
    <header class="side">
      <${Mark} />
      <nav aria-label=${t("nav.label")}>
        ${VIEW_NAMES.map((name) => html`
          <a href="#/${name}" key=${name} aria-current=${name === view ? "page" : undefined} onClick=${closeDrawer}><${Icon} name=${name} /><span>${t(`nav.${name}`)}</span></a>`)}
      </nav>
      <${Connection} />
    </header>
    <div class="scrim" onClick=${closeDrawer}></div>
    <main id="main" tabindex="-1" class="view-${view}">
      ${view !== "chat" && html`<div class="bar only-narrow"><${MenuButton} /><div class="heading">${t(`nav.${view}`)}</div></div>`}
      ${View && html`<${View} />`}
    </main>
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
fetchViews();
