// The texts of the page: one JSON file for each language. Missing keys are shown in English.
const FALLBACK = "en";
const RIGHT_TO_LEFT = new Set(["ar", "ckb", "dv", "fa", "he", "ps", "sd", "ug", "ur", "yi"]);
const folder = new URL("../strings/", import.meta.url);
const origin = new URL(import.meta.url).origin;

/** The languages that the node offers, by tag: each name in its own language. */
export const LANGUAGES = { [FALLBACK]: "English" };
let words = {};
let english = {};
export let language = FALLBACK;

async function load(address) {
  const reply = await fetch(address);
  if (!reply.ok) throw new Error(`no strings at ${address}: ${reply.status}`);
  return reply.json();
}

function nameOf(tag) {
  try {
    return new Intl.DisplayNames([tag], { type: "language" }).of(tag) ?? tag;
  } catch {
    return tag;
  }
}

async function learnLanguages() {
  const { data } = await load(`${origin}/page/languages`).catch(() => ({ data: [] }));
  for (const { id } of data) LANGUAGES[id] = nameOf(id);
}

/** The stored choice, else the first of the browser's languages that the node offers. */
function preferred() {
  const wanted = [localStorage.getItem("exo.language"), ...navigator.languages.flatMap((tag) => [tag, tag.split("-")[0]])];
  return wanted.find((name) => name in LANGUAGES) ?? FALLBACK;
}

export async function loadStrings(name) {
  if (!Object.keys(english).length) [english] = await Promise.all([load(new URL(`${FALLBACK}.json`, folder)), learnLanguages()]);
  name ??= preferred();
  words = await load(`${origin}/page/languages/${name}`).catch(() => english);
  language = name;
  document.documentElement.lang = name;
  document.documentElement.dir = RIGHT_TO_LEFT.has(name.split("-")[0]) ? "rtl" : "ltr";
}

/** Switches to a language and stores the choice in this browser. */
export async function chooseLanguage(name) {
  localStorage.setItem("exo.language", name);
  await loadStrings(name);
  dispatchEvent(new Event("exo-preferences"));
}

/** The text of a key, with {name} replaced by values.name, and {name|one|many} by the form for that number. */
export function t(key, values = {}) {
  const text = (words[key] ?? english[key] ?? key)
    .replace(/\{(\w+)\|([^|}]*)\|([^}]*)\}/g, (_, name, one, many) => String(values[name]) === "1" ? one : many);
  return text.replace(/\{(\w+)\}/g, (mark, name) => values[name] ?? mark);
}
