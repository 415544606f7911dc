// Runs the page's connection to a mesh without a browser: reads {key, closed, refuses} from standard input, follows the
// mesh at its own node and asks another one, and writes what each node was sent. Run in a copy of the page's folder.
import { readFileSync } from "node:fs";

const { key, closed, refuses } = JSON.parse(readFileSync(0, "utf-8"));
const HERE = "http://here", OTHER = "http://other";
const kept = new Map([["exo.key", key], ["exo.token", key.startsWith("exo-local-") ? key : ""]]);
globalThis.sessionStorage = {
  getItem: (name) => kept.get(name) ?? null, setItem: (name, text) => kept.set(name, text), removeItem: (name) => kept.delete(name),
};
globalThis.location = { origin: HERE, hash: "" };
globalThis.document = { hidden: false, addEventListener() {}, removeEventListener() {} };
const timers = [];
const real = globalThis.setTimeout;
globalThis.setTimeout = (call, ms) => (call === openSession ? timers.push(ms) : real(call, ms === 1000 ? 0 : ms));

const calls = [];
let made = 0, valid = "";
const answer = (status, json) => new Response(JSON.stringify(json), { status });
globalThis.fetch = async (url, { headers }) => {
  const sent = (headers.Authorization ?? "").replace("Bearer ", "");
  calls.push([url, sent]);
  if (url === `${HERE}/v1/session`) {
    if (refuses.includes(`session ${made += 1}`)) throw new Error("no route");
    valid = `exo-session-${made}`;
    return answer(200, closed ? { key: valid, id: "s-12345678", valid_s: 100 } : { key: null });
  }
  if (closed && url.endsWith("/state") && refuses.includes(sent)) return answer(401, { error: { message: "no", code: "invalid_api_key" } });
  if (!url.endsWith("/metrics/stream")) return answer(200, []);
  // the other node always says that the mesh is closed
  const health = { mesh: closed || url.startsWith(OTHER) ? "closed" : "open" };
  return new Response(`data: ${JSON.stringify({ type: "document", data: { health, node_id: "a", peers: {} } })}\n\n`);
};

const { call, fetchAt, follow, leave, mesh, onMesh, openSession } = await import("./app/mesh.js");
await openSession();
const connected = (base) => new Promise((resolve) => onMesh(() => mesh.base === base && mesh.connected && resolve()));
const first = connected(HERE);
follow();
await first;
mesh.document = { ...mesh.document, peers: { b: { api_url: OTHER } } };
await call("/state");
const second = connected(OTHER);
leave(HERE);
await second;
await fetchAt(OTHER, "/state");
process.stdout.write(JSON.stringify({ calls, timers, needsKey: mesh.needsKey }), () => process.exit(0));
