// Formulas in answers: recognised in Markdown, and rendered by KaTeX, which is loaded with the first one.

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
export const escaped = (text) => text.replace(/[&<>"']/g, (character) => ESCAPES[character]);

/** $$…$$ and \[…\] are display formulas, $…$ and \(…\) are inline formulas; a price such as $5 is neither. */
export const math = {
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
  renderer: ({ text, display }) => `<span class="math${display ? " display" : ""}">${escaped(text)}</span>`,
};
let katexLoading = null;
/** Renders formulas. KaTeX is loaded with the first formula; if that fails, formulas stay text. */
export function renderMath(place) {
  const elements = place.querySelectorAll(".math");
  if (!elements.length) return;
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
