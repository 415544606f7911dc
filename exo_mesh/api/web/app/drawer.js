// On a phone the navigation and the conversations are a drawer, which one button opens.
import { IconButton } from "./icons.js";
import { mesh } from "./mesh.js";
import { html, useEffect, useState } from "./ui.js";
import { t } from "./strings.js";

let isOpen = false;

function set(value) {
  isOpen = value;
  document.body.classList.toggle("drawer", value);
  dispatchEvent(new Event("exo-drawer"));
}

export function closeDrawer() {
  if (isOpen) set(false);
}

export function MenuButton() {
  const [, redraw] = useState(0);
  useEffect(() => {
    const changed = () => redraw((count) => count + 1);
    const pressed = (event) => {
      if (event.key !== "Escape" || !isOpen) return;
      event.preventDefault();
      closeDrawer();
    };
    addEventListener("exo-drawer", changed);
    addEventListener("keydown", pressed, true);
    return () => {
      removeEventListener("exo-drawer", changed);
      removeEventListener("keydown", pressed, true);
    };
  }, []);
  const level = mesh.connected ? mesh.document?.health?.level ?? "ok" : mesh.document ? "failed" : "ok";
  return html`<${IconButton} icon="menu" class="only-narrow" label=${t("nav.menu")} aria-expanded=${isOpen} onClick=${() => { set(!isOpen); document.querySelector(".side nav a")?.focus(); }}>
    ${level !== "ok" && html`<span class="dot level-${level}" aria-hidden="true"></span>`}<//>`;
}
