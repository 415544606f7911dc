// Calls functions of the page's modules that use no browser: reads [[module, name, arguments], …] from standard input and
// writes their results. Run in a copy of the page's folder, whose package.json says that its files are modules.
import { readFileSync } from "node:fs";

globalThis.localStorage = { getItem: () => process.argv[2] ?? "en" };
globalThis.sessionStorage = { getItem: () => null, setItem() {}, removeItem() {} };
globalThis.location = { origin: "http://here", hash: "" };
globalThis.document = { documentElement: {} };
globalThis.navigator ??= { languages: ["en"] };
globalThis.fetch = async (url) => ({ ok: true, json: async () => JSON.parse(readFileSync(String(url).startsWith("file:") && !String(url).includes("/page/languages") ? url : new URL(`./strings/${String(url).split("/").pop()}.json`, import.meta.url), "utf-8")) });

const { loadStrings } = await import("./app/strings.js");
await loadStrings(process.argv[2] ?? "en");
const results = [];
for (const [module, name, args] of JSON.parse(readFileSync(0, "utf-8"))) {
  results.push((await import(`./app/${module}.js`))[name](...args) ?? null);
}
process.stdout.write(JSON.stringify(results));
