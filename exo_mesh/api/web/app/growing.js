// Draws a text that grows, at a cost that does not depend on its length: blocks that can no longer change are drawn
// once, and only the last block is drawn again. The last block is cut where it is long itself.
import { codeFrame, decorate, languageOf } from "./code_blocks.js";
import { renderMath } from "./formulas.js";

const LONG = 1500; // characters of a last block that is drawn again and again
const KEPT = 200; // characters at the end of a paragraph that are not settled
const CHUNK_LINES = 50; // of code in one element: the browser lays out only the last one again
const MARKS = ["*", "_", "`", "~", "$"];
const JOINER = "\u2060"; // before the rest of a paragraph, so that it is not taken for a list or a title

export class GrowingText {
  /** reading: {blocks(text), html(text), inline(text)} of Markdown. */
  constructor(place, reading) {
    Object.assign(this, { place, reading, timer: 0, nextAt: 0 });
    this.#begin();
  }

  #begin() {
    this.place.textContent = "";
    this.tail = this.place.appendChild(document.createElement("div"));
    this.tail.className = "tail";
    // code: an open block of code. paragraph: an element whose first part is settled. isRough: a cut may have changed
    // how the whole looks, so all is drawn again at the end.
    Object.assign(this, { text: "", end: 0, code: null, paragraph: null, isRough: false, isWhole: false });
  }

  show(given, isGrowing) {
    const text = given.includes("\r") ? given.replace(/\r\n?/g, "\n") : given;
    if (this.isWhole && !isGrowing && text === this.text) return;
    if (this.isWhole || !text.startsWith(this.text)) this.#begin();
    this.text = text;
    clearTimeout(this.timer);
    if (!isGrowing) return this.#finish();
    const wait = this.nextAt - performance.now();
    if (wait > 0) this.timer = setTimeout(() => this.#grow(), wait);
    else this.#grow();
  }

  #finish() {
    const isRough = this.isRough || /^ {0,3}\[[^\]\n]+\]:/m.test(this.text); // links that are defined after their use
    if (this.end && isRough) {
      const { text } = this;
      this.#begin();
      this.text = text;
    }
    const rest = this.text.slice(this.end);
    this.tail.textContent = "";
    if (this.paragraph) this.#endParagraph(this.reading.blocks(JOINER + rest));
    else this.#settle(rest);
    this.tail.remove();
    this.isWhole = true;
  }

  #grow() {
    const rest = this.text.slice(this.end);
    if (this.code) return this.#growCode(rest);
    const joiner = this.paragraph ? JOINER : "";
    const blocks = this.reading.blocks(joiner + rest);
    const last = blocks.findLastIndex((one) => one.type !== "space");
    if (last < 0 || lengthOf(blocks) !== joiner.length + rest.length) return this.#drawTail(rest);
    if (last > 0) {
      const length = lengthOf(blocks.slice(0, last)) - joiner.length;
      if (this.paragraph) this.#endParagraph(blocks.slice(0, last));
      else this.#settle(rest.slice(0, length));
      this.end += length;
      return this.#growLast(blocks[last], rest.slice(length));
    }
    return this.#growLast(blocks[0], rest);
  }

  #growLast(block, rest) {
    if (block.type === "code" && this.#openCode(rest)) return;
    if (rest.length > LONG && block.type === "list" && this.#cutList(block, rest)) return this.#grow();
    if (rest.length > LONG && block.type === "paragraph") this.#cutParagraph(rest);
    this.#drawTail(this.text.slice(this.end));
  }

  /** Draws the last block. A long one that cannot be cut may use at most a quarter of the time. */
  #drawTail(rest) {
    const started = performance.now();
    if (this.paragraph) {
      this.paragraph.last.innerHTML = this.reading.inline(JOINER + rest);
      this.tail.textContent = "";
    } else {
      this.tail.innerHTML = this.reading.html(rest);
    }
    const took = performance.now() - started;
    this.nextAt = took > 4 ? performance.now() + 3 * took : 0;
  }

  #settle(source) {
    const made = document.createElement("template");
    made.innerHTML = this.reading.html(source);
    decorate(made.content);
    renderMath(made.content);
    this.tail.before(made.content);
  }

  // code

  #openCode(rest) {
    const [head, fence, info] = /^ {0,3}(`{3,}|~{3,})([^\n]*)\n/.exec(rest) ?? [];
    if (!head) return false;
    const start = this.end;
    const { frame, code } = codeFrame(languageOf(info).name, () => this.text.slice(start + head.length));
    this.tail.replaceChildren(frame);
    this.code = { fence, code, drawn: head.length, chunk: null, lines: 0 };
    this.#growCode(rest);
    return true;
  }

  #growCode(rest) {
    const { fence, drawn } = this.code;
    const from = rest.lastIndexOf("\n", drawn - 1);
    const closing = new RegExp(`\\n {0,3}${fence[0]}{${fence.length},} *\\n`, "g");
    closing.lastIndex = from;
    if (closing.test(rest)) {
      this.code = null;
      this.tail.textContent = "";
      this.#settle(rest.slice(0, closing.lastIndex));
      this.end += closing.lastIndex;
      return this.#grow();
    }
    this.#addCode(rest.slice(drawn));
    this.code.drawn = rest.length;
  }

  #addCode(added) {
    const { code } = this;
    for (const line of added.split(/(?<=\n)/)) {
      if (!code.chunk || code.lines >= CHUNK_LINES) {
        code.chunk = code.code.appendChild(document.createElement("span")).appendChild(document.createTextNode(""));
        code.lines = 0;
      }
      code.chunk.appendData(line);
      if (line.endsWith("\n")) code.lines += 1;
    }
  }

  // lists and paragraphs

  /** Settles all items of a list but the last. Returns whether it did. */
  #cutList({ items, ordered, start, loose }, rest) {
    const source = items.slice(0, -1).map((one) => one.raw).join("");
    if (items.length < 2 || !rest.startsWith(source)) return false;
    this.#settle(source);
    this.tail.previousElementSibling.classList.add("cut");
    const isNext = !ordered || Number(/\d+/.exec(rest.slice(source.length))?.[0]) === Number(start) + items.length - 1;
    this.isRough ||= loose || !isNext;
    this.end += source.length;
    return true;
  }

  /** Settles the beginning of a paragraph, unless a mark that is open there could change how it looks. Text without
   * marks is cut where a line of the page begins, so that what is settled is a block that is not laid out again. */
  #cutParagraph(rest) {
    const at = rest.lastIndexOf(" ", rest.length - KEPT) + 1;
    const begin = rest.slice(0, at);
    if (!at || /[[\]<>\\]/.test(begin) || MARKS.some((mark) => begin.split(mark).length % 2 === 0)) return;
    const paragraph = this.#paragraph();
    const lineAt = paragraph.isInline || /[&@:]|www/.test(begin) || MARKS.some((mark) => begin.includes(mark)) ? 0 : this.#lineBegin(begin);
    const part = this.#inline(lineAt ? begin.slice(0, lineAt) : begin);
    if (lineAt) part.className = "lines";
    else paragraph.isInline = true;
    paragraph.last.before(part);
    this.isRough = true;
    this.end += lineAt || at;
  }

  /** Where the last line of a text begins that is shown at the end of the paragraph; 0 if that is not known. */
  #lineBegin(text) {
    const { last } = this.#paragraph();
    last.textContent = text;
    const range = document.createRange();
    const topAt = (index) => {
      range.setStart(last.firstChild, index);
      range.setEnd(last.firstChild, index + 1);
      return range.getBoundingClientRect().top;
    };
    const bottom = topAt(text.length - 2);
    let above = 0, below = text.length - 2;
    if (topAt(0) >= bottom) return 0;
    while (below - above > 1) {
      const middle = (above + below) >> 1;
      if (topAt(middle) < bottom - 1) above = middle;
      else below = middle;
    }
    return text[below - 1] === " " ? below : 0;
  }

  #paragraph() {
    if (!this.paragraph) {
      const element = document.createElement("p");
      this.tail.before(element);
      this.paragraph = { element, last: element.appendChild(document.createElement("span")), isInline: false };
    }
    return this.paragraph;
  }

  #inline(source) {
    const part = document.createElement("span");
    part.innerHTML = this.reading.inline(source);
    return part;
  }

  /** Settles the rest of a paragraph, and the blocks after it. */
  #endParagraph([first, ...others]) {
    this.paragraph.last.replaceWith(this.#inline(first ? first.raw.trimEnd() : ""));
    this.paragraph = null;
    const source = others.map((one) => one.raw).join("");
    if (source.trim()) this.#settle(source);
  }
}

const lengthOf = (blocks) => blocks.reduce((sum, one) => sum + one.raw.length, 0);
