// Renders a model's Markdown as safe DOM: HTML in it stays text, images become links, and the result is sanitized, too.
import DOMPurify from "../vendor/dompurify/purify.es.mjs";
import hljs from "../vendor/highlight.js/core.min.js";
import { Marked } from "../vendor/marked/marked.esm.js";
import bash from "../vendor/highlight.js/bash.min.js";
import c from "../vendor/highlight.js/c.min.js";
import cpp from "../vendor/highlight.js/cpp.min.js";
import css from "../vendor/highlight.js/css.min.js";
import diff from "../vendor/highlight.js/diff.min.js";
import go from "../vendor/highlight.js/go.min.js";
import java from "../vendor/highlight.js/java.min.js";
import javascript from "../vendor/highlight.js/javascript.min.js";
import json from "../vendor/highlight.js/json.min.js";
import python from "../vendor/highlight.js/python.min.js";
import rust from "../vendor/highlight.js/rust.min.js";
import sql from "../vendor/highlight.js/sql.min.js";
import typescript from "../vendor/highlight.js/typescript.min.js";
import xml from "../vendor/highlight.js/xml.min.js";
import yaml from "../vendor/highlight.js/yaml.min.js";
import { html, useLayoutEffect, useRef } from "./ui.js";
import { t } from "./strings.js";

const GRAMMARS = { bash, c, cpp, css, diff, go, java, javascript, json, python, rust, sql, typescript, xml, yaml };
for (const [name, grammar] of Object.entries(GRAMMARS)) hljs.registerLanguage(name, grammar);

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escape = (text) => text.replace(/[&<>"']/g, (character) => ESCAPES[character]);

/** $$…$$ and \[…\] are display formulas, $…$ and \(…\) are inline formulas; a price such as $5 is neither. */
const math = {
  name: "math",
  level: "inline",
  start: (source) => source.search(/\$|\\[([]/),
  tokenizer(source) {
    const found = /^\$\$([^$]+)\$\$/.exec(source) ?? /^\\\[([\s\S]+?)\\\]/.exec(source);
    if (found) return { type: "math", raw: found[0], text: found[1], display: true };
    const inline = /^\$(?!\s)([^$\n]*[^$\s])\$(?!\d)/.exec(source) ?? /^\\\((.+?)\\\)/.exec(source);
    const isMath = inline && !/(^|[^\\])%/.test(inline[1]); // a bare % starts a TeX comment, so such a text is not a formula
    return isMath ? { type: "math", raw: inline[0], text: inline[1], display: false } : undefined;
  },
  renderer: ({ text, display }) => `<span class="math${display ? " display" : ""}">${escape(text)}</span>`,
};
const renderer = {
  html: ({ text }) => escape(text),
  image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`, // an answer must not load anything from other servers
};
const marked = new Marked({ gfm: true, breaks: true, extensions: [math], renderer });

const SAFE = { FORBID_TAGS: ["img", "audio", "video", "svg", "style", "form", "input", "button", "textarea", "select"], FORBID_ATTR: ["style", "id", "name"] };
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

export function safeHtml(text) {
  return DOMPurify.sanitize(marked.parse(text), SAFE);
}

/** Renders a text. A long text takes tens of milliseconds, so a growing one may use at most a quarter of the time. */
export function Markdown({ text }) {
  const place = useRef(null);
  const timing = useRef({ next: 0 }).current;
  useLayoutEffect(() => {
    const work = () => {
      const started = performance.now();
      draw(place.current, text);
      timing.next = performance.now() + 3 * (performance.now() - started);
    };
    const wait = timing.next - performance.now();
    if (wait <= 0) return work();
    const timer = setTimeout(work, wait);
    return () => clearTimeout(timer);
  }, [text]);
  return html`<div class="markdown" ref=${place}></div>`;
}

function draw(place, text) {
  place.innerHTML = safeHtml(text);
  for (const block of place.querySelectorAll("pre > code")) decorate(block);
  const formulas = place.querySelectorAll(".math");
  if (formulas.length) renderMath(formulas);
}

function decorate(block) {
  const name = /language-(\w+)/.exec(block.className)?.[1] ?? "";
  const source = block.textContent;
  if (hljs.getLanguage(name)) block.innerHTML = hljs.highlight(source, { language: name }).value;
  const copy = document.createElement("button");
  copy.className = "copy";
  copy.type = "button";
  copy.textContent = t("chat.copy");
  copy.addEventListener("click", async () => {
    if (await copyText(source)) copy.textContent = t("chat.copied");
  });
  const frame = document.createElement("div"); // only the block scrolls sideways, not its button
  frame.className = "code";
  const pre = block.parentElement;
  pre.tabIndex = 0;
  pre.replaceWith(frame);
  frame.append(pre, copy);
}

/** Copies a text. The clipboard API needs HTTPS or localhost; elsewhere execCommand is used. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

let katexLoading = null;
/** Renders formulas. KaTeX is loaded with the first formula; if that fails, formulas stay text. */
function renderMath(elements) {
  katexLoading ??= loadKatex();
  katexLoading.then(
    () => {
      for (const element of elements) {
        const displayMode = element.classList.contains("display");
        const source = element.textContent;
        try {
          withoutStyleAttributes(() => globalThis.katex.render(source, element, { displayMode, throwOnError: true, trust: false }));
        } catch {
          element.textContent = source; // KaTeX could not parse it: show the text
        }
      }
    },
    () => { katexLoading = null; },
  );
}

/** Runs `work` with style attributes set as properties: the security policy forbids the attributes that KaTeX sets. */
function withoutStyleAttributes(work) {
  const { setAttribute } = Element.prototype;
  Element.prototype.setAttribute = function (name, value) {
    if (name === "style") this.style.cssText = value;
    else setAttribute.call(this, name, value);
  };
  try {
    work();
  } finally {
    Element.prototype.setAttribute = setAttribute;
  }
}

async function loadKatex() {
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = new URL("../vendor/katex/katex.min.css", import.meta.url).href;
  document.head.append(style);
  await import("../vendor/katex/katex.min.js");
}
