// Draws the picture of a mesh without a browser: reads {document, instance, rate, isNarrow, …} from standard input and
// writes SVG. Run in a copy of the page's folder, whose package.json says that its files are modules.
import { readFileSync } from "node:fs";

globalThis.localStorage = { getItem: () => "en" };
globalThis.document = { documentElement: {} };
globalThis.navigator ??= { languages: ["en"] };
globalThis.fetch = async (url) => ({ ok: true, json: async () => JSON.parse(readFileSync(url, "utf-8")) });

const { loadStrings } = await import("./app/strings.js");
const { Ring } = await import("./app/ring.js");
const { html } = await import("./app/ui.js");
await loadStrings("en");

const escaped = (text) => String(text).replace(/[&<>"]/g, (one) => `&#${one.charCodeAt(0)};`);

/** A virtual node as text; handlers have none. */
function written(node, depth = 0) {
  if (node === null || node === undefined || typeof node === "boolean") return "";
  if (Array.isArray(node)) return node.map((one) => written(one, depth)).join("");
  if (typeof node !== "object") return escaped(node).trim();
  const { type, props } = node;
  if (typeof type === "function") return written(type(props), depth);
  const { children, ...attributes } = props;
  const listed = Object.entries(attributes).filter(([, value]) => typeof value !== "function" && value !== undefined && value !== false);
  const words = listed.map(([name, value]) => ` ${name}="${escaped(value)}"`).join("");
  return `\n${" ".repeat(depth)}<${type}${words}>${written(children, depth + 1)}</${type}>`;
}

const cases = JSON.parse(readFileSync(0, "utf-8"));
const drawn = cases.map((props) => written(html`<${Ring} ...${props} choose=${() => {}} point=${() => {}} />`).trim());
process.stdout.write(JSON.stringify(drawn));
