// The icons of the page: one path each, drawn with the colour of the text.
import { html } from "./ui.js";

const PATHS = {
  again: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  attach: "M20 11.5l-8 8a5 5 0 0 1-7-7L13.5 4a3.4 3.4 0 0 1 4.8 4.8l-8.5 8.5a1.7 1.7 0 0 1-2.4-2.4L15 7.3",
  branch: "M7 8v8M7 8a2 2 0 1 1 .01 0M7 20a2 2 0 1 1 .01 0M17 8a2 2 0 1 1 .01 0M17 8c0 5-10 3-10 8",
  chat: "M4 5h16v11H9l-5 4z",
  check: "M5 12.5l4.5 4.5L19 7.5",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  down: "M7 10l5 5 5-5",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  edit: "M4 20l1-4L16.5 4.5l3 3L8 19zM14 7l3 3",
  file: "M7 3h7l4 4v14H7zM14 3v4h4",
  globe: "M12 4a8 8 0 1 1 0 16 8 8 0 0 1 0-16M4 12h16M12 4c-5 5-5 11 0 16M12 4c5 5 5 11 0 16",
  left: "M14 6l-6 6 6 6",
  menu: "M4 7h16M4 12h16M4 17h16",
  mesh: "M12 3a3 3 0 1 1 0 6 3 3 0 0 1 0-6M5 15a3 3 0 1 1 0 6 3 3 0 0 1 0-6M19 15a3 3 0 1 1 0 6 3 3 0 0 1 0-6M10 9 7 15M14 9l3 6M8 18h8",
  models: "M12 3l8 4-8 4-8-4zM4 12l8 4 8-4M4 17l8 4 8-4",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  new: "M11 5H5v14h14v-6M9 15l1-3.5L18 3.5 20.5 6l-8 8z",
  onward: "M8 5.5v13l10.5-6.5z",
  options: "M6 4v7M6 15v5M12 4v3M12 11v9M18 4v9M18 17v3M4 13h4M10 9h4M16 15h4",
  pin: "M9 4h6l-1 6 3 3H7l3-3zM12 13v7",
  requests: "M4 19V9M10 19V5M16 19v-7M21 19H3",
  right: "M10 6l6 6-6 6",
  search: "M11 5a6 6 0 1 1 0 12 6 6 0 0 1 0-12M15.5 15.5L20 20",
  send: "M12 19V5M6 11l6-6 6 6",
  settings: "M4 7h9M17 7h3M13 4.5v5M4 17h3M11 17h9M11 14.5v5",
  stop: "M7 7h10v10H7z",
  think: "M9 18h6M10 21h4M8.5 15a6 6 0 1 1 7 0c-.7.6-1 1.3-1 2h-5c0-.7-.3-1.4-1-2",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
};

export function Icon({ name }) {
  return html`<svg class="icon icon-${name}" viewBox="0 0 24 24" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
}

/** A button that shows only an icon; its label is its accessible name and its tooltip. */
export function IconButton({ icon, label, children = null, ...more }) {
  return html`<button type="button" aria-label=${label} title=${label} ...${more} class="icon-button ${more.class ?? ""}"><${Icon} name=${icon} />${children}</button>`;
}
