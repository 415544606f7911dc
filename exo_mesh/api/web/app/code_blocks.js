// Code blocks of answers: a bar with the name of the language and a button to copy, and colours.
import { t } from "./strings.js";

const LANGUAGES = ["bash", "c", "cpp", "css", "diff", "go", "java", "javascript", "json", "python", "rust", "sql", "typescript", "xml", "yaml"];
const SHORT = { js: "javascript", jsx: "javascript", mjs: "javascript", ts: "typescript", tsx: "typescript", py: "python", sh: "bash", shell: "bash", zsh: "bash", console: "bash", html: "xml", svg: "xml", yml: "yaml", rs: "rust", "c++": "cpp", h: "c", golang: "go", patch: "diff" };
const NAMES = { cpp: "C++", css: "CSS", javascript: "JavaScript", json: "JSON", sql: "SQL", typescript: "TypeScript", xml: "HTML", yaml: "YAML" };
const MOST_COLOURED = 30000; // characters: longer blocks stay plain, because they would stop the page

/** The names of a block's language: for people, and of its grammar, "" if there is none. info: after the fence. */
export function languageOf(info) {
  const given = (info ?? "").trim().split(/[\s{,]/)[0];
  const id = given.toLowerCase(), grammar = SHORT[id] ?? id;
  const known = LANGUAGES.includes(grammar) ? grammar : "";
  return { grammar: known, name: given && (known && id !== "html" && id !== "svg" ? NAMES[known] ?? known[0].toUpperCase() + known.slice(1) : given) };
}

/** An element for a block. Returns {frame, code}; write the text into code. source(): the text to copy. */
export function codeFrame(name, source) {
  const frame = document.createElement("div");
  const bar = frame.appendChild(document.createElement("div"));
  const pre = frame.appendChild(document.createElement("pre")); // only the block scrolls sideways, not its bar
  const code = pre.appendChild(document.createElement("code"));
  const copy = document.createElement("button");
  frame.className = "code";
  bar.className = "code-bar";
  pre.tabIndex = 0;
  copy.type = "button";
  copy.className = "copy";
  copy.textContent = t("chat.copyCode");
  copy.addEventListener("click", async () => {
    if (!(await copyText(source()))) return;
    copy.textContent = t("chat.copied");
    setTimeout(() => { copy.textContent = t("chat.copyCode"); }, 1500);
  });
  bar.append(Object.assign(document.createElement("span"), { textContent: name || t("chat.code") }), copy);
  return { frame, code };
}

/** Gives every code block of a place its bar and colours. */
export function decorate(place) {
  for (const block of place.querySelectorAll("pre > code")) {
    if (block.closest(".code")) continue;
    const { grammar, name } = languageOf(/language-(\S+)/.exec(block.className)?.[1]);
    const source = block.textContent;
    const { frame, code } = codeFrame(name, () => source);
    code.textContent = source;
    block.parentElement.replaceWith(frame);
    if (grammar && source.length <= MOST_COLOURED) colour(code, source, grammar);
  }
}

let core = null;
const grammars = new Map();

/** Colours a block. The highlighter and each grammar are loaded with the first block that needs them. */
async function colour(code, source, grammar) {
  try {
    core ??= import("../vendor/highlight.js/core.min.js").then((module) => module.default);
    if (!grammars.has(grammar)) grammars.set(grammar, import(`../vendor/highlight.js/${grammar}.min.js`));
    const [hljs, module] = await Promise.all([core, grammars.get(grammar)]);
    if (!hljs.getLanguage(grammar)) hljs.registerLanguage(grammar, module.default);
    code.innerHTML = hljs.highlight(source, { language: grammar }).value;
  } catch {
    core = null; // the block stays plain, and the next one tries again
    grammars.delete(grammar);
  }
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

