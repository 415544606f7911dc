// The words of the page: one JSON file per language. A key that a language lacks is shown in English.
export const LANGUAGES = { en: "English", de: "Deutsch" };
const FALLBACK = "en";
const folder = new URL("../strings/", import.meta.url);

let words = {};
let english = {};
export let language = FALLBACK;

async function load(name) {
  const reply = await fetch(new URL(`${name}.json`, folder));
  if (!reply.ok) throw new Error(`no strings for ${name}: ${reply.status}`);
  return reply.json();
}

/** The stored choice, else the first language of the browser that there is. */
function preferred() {
  const wanted = [localStorage.getItem("exo.language"), ...navigator.languages.map((tag) => tag.split("-")[0])];
  return wanted.find((name) => name in LANGUAGES) ?? FALLBACK;
}

export async function loadStrings(name = preferred()) {
  english = await load(FALLBACK);
  words = name === FALLBACK ? english : await load(name).catch(() => english);
  language = name;
  document.documentElement.lang = name;
}

/** The text of a key, with {name} replaced by values.name. */
export function t(key, values = {}) {
  const text = words[key] ?? english[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (mark, name) => values[name] ?? mark);
}
