// A button that opens a short list of actions; Escape and a click elsewhere close it.
import { Icon, IconButton } from "./icons.js";
import { html, useLayoutEffect, useRef, useState } from "./ui.js";

/** items: [{icon, label, act, danger}] */
export function Menu({ label, items, icon = "more" }) {
  const [isOpen, open] = useState(false);
  const place = useRef(null);
  useLayoutEffect(() => {
    if (!isOpen) return undefined;
    place.current.querySelector("[role=menuitem]")?.focus();
    const outside = (event) => !place.current?.contains(event.target) && open(false);
    addEventListener("pointerdown", outside);
    return () => removeEventListener("pointerdown", outside);
  }, [isOpen]);
  const close = () => { open(false); place.current.querySelector("button").focus(); };
  const pressed = (event) => {
    if (!isOpen) return;
    const all = [...place.current.querySelectorAll("[role=menuitem]")];
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") close();
    else if (event.key === "Tab") return open(false);
    else if (step) all.at((all.indexOf(document.activeElement) + step) % all.length).focus();
    else return;
    event.preventDefault();
  };
  return html`<div class="menu" ref=${place} onKeyDown=${pressed}>
    <${IconButton} icon=${icon} label=${label} aria-haspopup="menu" aria-expanded=${isOpen} onClick=${() => open(!isOpen)} />
    ${isOpen && html`<div class="menu-list" role="menu" aria-label=${label}>${items.map((one) => html`<button type="button" role="menuitem" key=${one.label}
      class=${one.danger ? "danger" : ""} onClick=${() => { close(); one.act(); }}><${Icon} name=${one.icon} />${one.label}</button>`)}</div>`}
  </div>`;
}
