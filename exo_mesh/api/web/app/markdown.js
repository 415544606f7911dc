// Renders a model's Markdown as safe DOM: HTML in it stays text, images become links, and the result is sanitized, too.
import DOMPurify from "../vendor/dompurify/purify.es.mjs";
import { Marked } from "../vendor/marked/marked.esm.js";
import { escaped, math } from "./formulas.js";
import { GrowingText } from "./growing.js";
import { html, useLayoutEffect, useRef } from "./ui.js";

const renderer = {
  html: ({ text }) => escaped(text),
  image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`, // an answer must not load anything from other servers
  checkbox: ({ checked }) => `<span class="box" role="img" aria-label="${checked ? "☑" : "☐"}">${checked ? "☑" : "☐"}</span> `,
};
const marked = new Marked({ gfm: true, breaks: true, extensions: [math], renderer });

const SAFE = { FORBID_TAGS: ["img", "audio", "video", "svg", "style", "form", "input", "button", "textarea", "select"], FORBID_ATTR: ["style", "id", "name"] };
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

/** How a growing text is read: blocks with their source, and safe HTML of a text, or of a text inside a paragraph. */
export const reading = {
  blocks: (text) => marked.lexer(text),
  html: (text) => DOMPurify.sanitize(marked.parse(text), SAFE),
  inline: (text) => DOMPurify.sanitize(marked.parseInline(text), SAFE),
};

/** Renders a text, which may grow. isGrowing: the text is not complete. */
export function Markdown({ text, isGrowing = false }) {
  const place = useRef(null);
  const drawn = useRef(null);
  useLayoutEffect(() => {
    drawn.current ??= new GrowingText(place.current, reading);
    drawn.current.show(text, isGrowing);
  }, [text, isGrowing]);
  return html`<div class="markdown" dir="auto" ref=${place}></div>`;
}
