// The web tools in a chat: what the model may call, and the calls themselves, which the node makes.
import { call, mesh } from "./mesh.js";

export const MOST_ROUNDS = 6; // of calls before the model must answer
const MOST_CHARS = 8000; // of a page

const text = (description) => ({ type: "string", description });
const KNOWN = {
  web_search: { about: "Search the web. Returns titles, addresses and excerpts.", properties: { query: text("What to search for") } },
  extract_page: { about: "Read the text of a web page.", properties: { url: text("The address of the page, with https://") } },
};

/** The names of the tools that this node runs for this caller. */
export function offeredTools() {
  return (mesh.hello?.web_tools ?? []).filter((name) => name in KNOWN);
}

export function takesTools(model) {
  return Boolean(model?.capabilities?.tools?.supported);
}

/** The tools as a request names them. */
export function toolsOf(names) {
  return names.map((name) => {
    const { about, properties } = KNOWN[name];
    return { type: "function", function: { name, description: about, parameters: { type: "object", properties, required: Object.keys(properties) } } };
  });
}

/** Whether every call of an answer is one that the page makes. */
export function areOurs(calls) {
  return calls.length > 0 && calls.every((one) => one.name in KNOWN);
}

/** The result of a call as a text for the model; a failure is a text, too. */
export async function resultOf({ name, arguments: given }) {
  try {
    const asked = JSON.parse(given);
    const body = Object.fromEntries(Object.keys(KNOWN[name].properties).map((key) => [key, String(asked[key] ?? "")]));
    if (name === "extract_page") body.max_chars = MOST_CHARS;
    return JSON.stringify(await call(`/v1/tools/${name}`, { method: "POST", body }));
  } catch (error) {
    return JSON.stringify({ error: error.message });
  }
}
