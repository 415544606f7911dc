// Small components of the Settings view.
import { copyText } from "./code_blocks.js";
import { html, useState } from "./ui.js";
import { t } from "./strings.js";

/** A text with a copy button. */
export function CopyLine({ text }) {
  const [done, setDone] = useState(false);
  const copy = async () => { setDone(await copyText(text)); setTimeout(() => setDone(false), 1500); };
  return html`<div class="copy-line"><code tabindex="0">${text}</code><button type="button" onClick=${copy}>${t(done ? "chat.copied" : "chat.copy")}</button></div>`;
}

/** rows: the modules of a QR code, "1" for a dark module. The quiet zone around the code is 4 modules wide. */
export function QrCode({ rows, label }) {
  const size = rows.length + 8;
  const path = rows.flatMap((row, y) => [...row.matchAll(/1+/g)].map(({ index, 0: run }) => `M${index + 4} ${y + 4}h${run.length}v1h-${run.length}z`)).join("");
  return html`<svg class="qr" viewBox="0 0 ${size} ${size}" role="img" aria-label=${label} shape-rendering="crispEdges">
    <rect width=${size} height=${size} /><path d=${path} /></svg>`;
}
