// The connection to the mesh: the node in use, the key, API calls, and the live document.
import { withChanges } from "./changes.js";
import { rememberMembers, rememberedMembers } from "./members.js";
import { readEvents } from "./sse.js";

const CONNECT_MS = 5000;
const SILENCE_MS = 8000; // the node sends an event every 2 s
const RETRY_MS = 1000;
const RENEW_RETRY_MS = 60000; // until the node of the token makes a session again

export class ApiError extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `HTTP ${status}`);
    this.status = status;
    this.code = body?.error?.code ?? "";
  }
}

/** Raised if a node does not answer: it is down, or this machine cannot reach it. */
export class UnreachableError extends Error {}

export const mesh = {
  base: location.origin,
  hello: null,
  document: null,
  connected: false,
  needsKey: false,
  keyRefused: false, // the last key was not valid
  misses: 0, // nodes that did not answer since the last one that did
  left: "", // the name of the last node that did not answer; "" before the page has changed nodes
  rates: {}, // tokens and frames per second of each instance, from the counters of its driver
  events: [], // events since the page was opened; see changes.js
  memory: [], // [time, memory pressure of this node in %], the newest last
};

const listeners = new Set();
export function onMesh(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}
function changed() {
  for (const listener of listeners) listener();
}

// the key

const LOCAL = "exo-local-"; // begins the local token, which only its own node accepts

/** Takes the key from the address that a node prints in its terminal, and removes it from the address bar. */
function takeKey() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  keep(given);
  history.replaceState(null, "", "#/chat");
}

/** Keeps a key in this tab, and a local token beside the session that replaces it. */
function keep(text) {
  key = text.trim();
  token = key.startsWith(LOCAL) ? key : "";
  sessionStorage.setItem("exo.key", key);
  sessionStorage.setItem("exo.token", token);
  sessionStorage.removeItem("exo.session");
}

let key = sessionStorage.getItem("exo.key") ?? "";
let token = sessionStorage.getItem("exo.token") ?? "";
let keyWaiters = [];
takeKey();

export function setKey(text) {
  keep(text);
  accepted();
  openSession();
}
function accepted() {
  mesh.needsKey = false;
  changed();
  for (const go of keyWaiters.splice(0)) go();
}

/** Exchanges the local token for a session that every member of a closed mesh accepts, so that the page outlives its
 * node. Renews it under the same id, which its running answers belong to, and tries again as long as there is a token.
 * Returns whether there is a new session. */
export async function openSession() {
  const exchanged = token;
  let pauseMs = RENEW_RETRY_MS;
  if (!exchanged) return false;
  try {
    const headers = { Authorization: `Bearer ${exchanged}`, "Content-Type": "application/json" };
    const body = JSON.stringify({ id: sessionStorage.getItem("exo.session") });
    const reply = await fetchAt(location.origin, "/v1/session", { method: "POST", headers, body });
    const made = reply.ok ? await reply.json() : {};
    if (reply.ok && !made.key) pauseMs = 0; // a mesh without a secret makes none
    if (!made.key || token !== exchanged) return false;
    key = made.key;
    sessionStorage.setItem("exo.key", key);
    sessionStorage.setItem("exo.session", made.id);
    pauseMs = made.valid_s * 500;
    accepted();
    return true;
  } catch {
    return false; // the node has gone: the page keeps what it has
  } finally {
    if (token === exchanged) {
      clearTimeout(renewal);
      if (pauseMs) renewal = setTimeout(openSession, pauseMs);
    }
  }
}
let renewal = 0;
export function askForKey() {
  mesh.needsKey = true;
  mesh.keyRefused = key !== "";
  changed();
}
/** Asks for a key and waits until there is one. */
export function untilKey() {
  askForKey();
  return new Promise((resolve) => keyWaiters.push(resolve));
}
/** The credential for a call. Only the local token may open an invitation over plain HTTP from another machine. Only
 * its own node accepts that token, and any machine can join an open mesh and wait for keys. */
let isClosed = rememberedMembers().closed; // as the node of this page says; another one may lie
function authorization(base, path) {
  const isOrigin = base === location.origin;
  if (!isOrigin && (key.startsWith(LOCAL) || !isClosed)) return {};
  const shown = token && isOrigin && path === "/v1/invite" ? token : key;
  return shown ? { Authorization: `Bearer ${shown}` } : {};
}

// the node in use

/** The addresses of all members; the node in use is first. */
export function bases() {
  const peers = Object.values(mesh.document?.peers ?? {});
  const urls = mesh.document ? peers.map((peer) => peer.api_url).filter(Boolean) : rememberedMembers().list.map((one) => one.url);
  return [...new Set([mesh.base, location.origin, ...urls])];
}

/** Switches from this member to the next one; does nothing if the page has already switched. */
export function leave(base) {
  if (mesh.base !== base) return;
  const known = bases();
  mesh.left = nameOf(base);
  mesh.base = known[(known.indexOf(base) + 1) % known.length];
  mesh.connected = false;
  mesh.misses += 1;
  changed();
}

/** The name of the member at an address, or the address itself. */
export function nameOf(base) {
  const peers = Object.values(mesh.document?.peers ?? {});
  return names[base] ?? peers.find((peer) => peer.api_url === base)?.name ?? rememberedMembers().list.find((one) => one.url === base)?.name ?? base.replace(/^https?:\/\//, "");
}
const names = {}; // of the nodes whose data this page has read, by their addresses

/** Calls fetch at one node; once more if the node of the token refuses a session that has ended. Raises
 * UnreachableError if no response head arrives. The signal also ends the body. */
export async function fetchAt(base, path, options = {}, connectMs = CONNECT_MS) {
  const reply = await fetchOnce(base, path, options, connectMs);
  if (reply.status !== 401 || base !== location.origin || options.headers?.Authorization) return reply;
  return (await openSession()) ? fetchOnce(base, path, options, connectMs) : reply;
}

async function fetchOnce(base, path, options, connectMs) {
  const stop = new AbortController();
  options.signal?.addEventListener("abort", () => stop.abort());
  const timer = setTimeout(() => stop.abort(), connectMs);
  try {
    const headers = { ...authorization(base, path), ...options.headers };
    return await fetch(base + path, { ...options, headers, signal: stop.signal });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new UnreachableError(`${base}: ${error.message}`);
  } finally {
    clearTimeout(timer);
  }
}

/** Makes one call and returns its JSON. If a node does not answer a GET, the next node is asked. Raises ApiError. */
export async function call(path, { method = "GET", body, timeoutMs = 60000 } = {}) {
  const options = { method };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "Content-Type": "application/json" };
  }
  for (let tries = method === "GET" ? bases().length : 1; ; tries -= 1) {
    const base = mesh.base;
    try {
      const reply = await fetchAt(base, path, options, timeoutMs);
      const json = await reply.json().catch(() => null);
      if (reply.ok) return json;
      if (reply.status === 401) askForKey();
      throw new ApiError(reply.status, json);
    } catch (error) {
      if (!(error instanceof UnreachableError) || tries <= 1) throw error;
      leave(base);
    }
  }
}

export function mayAdmin() {
  return mesh.hello?.caller.role === "admin";
}

// the live document

/** Applies a JSON merge patch (RFC 7396). */
function patched(target, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const made = target !== null && typeof target === "object" && !Array.isArray(target) ? { ...target } : {};
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete made[name];
    else made[name] = patched(made[name], value);
  }
  return made;
}

function take(document) {
  const before = mesh.document;
  mesh.document = document;
  for (const peer of Object.values(document.peers ?? {})) seen[peer.id] = peer.name;
  mesh.events = withChanges(mesh.events, before, document, seen);
  if (!counted || document.time - counted.time > 30) counted = document;
  const seconds = document.time - counted.time;
  if (seconds < 1.5) return addMemory(document); // counters of other peers are updated once a second
  mesh.rates = ratesOf(counted, document, seconds);
  counted = document;
  addMemory(document);
}

const seen = {}; // the names of all peers since the page was opened, by id
let counted = null; // the earlier document for computing the rates

function addMemory(document) {
  if (document.memory) mesh.memory = [...mesh.memory.slice(-149), [document.time, document.memory.pressure_pct]];
}

/** Fetches the memory readings from before this page was opened. */
function readMemory(base) {
  call("/memory/live").then((past) => {
    if (base === mesh.base) mesh.memory = past.map((one) => [one.time, one.pressure_pct]);
  }, () => {});
}

/** The rates of an instance; 0 while they are unknown. */
export function rateOf(instance) {
  return mesh.rates[instance?.id] ?? { tokens: 0, frames: 0 };
}

function ratesOf(before, after, seconds) {
  const rates = {};
  for (const [id, peer] of Object.entries(after.peers ?? {})) {
    for (const what of ["tokens", "frames"]) {
      for (const [name, total] of Object.entries(peer[what] ?? {})) {
        const old = before.peers?.[id]?.[what]?.[name] ?? total;
        rates[name] ??= { tokens: 0, frames: 0 };
        rates[name][what] = Math.max(rates[name][what], (total - old) / seconds);
      }
    }
  }
  return rates;
}

async function listenAt(base, signal) {
  const reply = await fetchAt(base, "/metrics/stream", { signal });
  if (reply.status === 401) return untilKey();
  if (!reply.ok) throw new ApiError(reply.status, await reply.json().catch(() => null));
  for await (const event of readEvents(reply, SILENCE_MS)) {
    if (!event.data) continue;
    const { type, data } = JSON.parse(event.data);
    if (type === "hello") mesh.hello = data;
    else take(type === "document" ? data : patched(mesh.document, data));
    if (base === location.origin) isClosed = mesh.document?.health?.mesh === "closed";
    if (type === "document") readMemory(base);
    names[base] = mesh.document?.peers?.[mesh.document.node_id]?.name ?? names[base];
    Object.assign(mesh, { connected: true, misses: 0 });
    rememberMembers(mesh.document?.peers, isClosed, { name: nameOf(location.origin), url: location.origin });
    changed();
  }
}

/** Follows the mesh while the page is open. A hidden page makes no calls. */
export async function follow() {
  for (;;) {
    if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    if (document.hidden) continue;
    const base = mesh.base;
    const stop = new AbortController();
    const hide = () => document.hidden && stop.abort();
    document.addEventListener("visibilitychange", hide);
    try {
      await listenAt(base, stop.signal);
    } catch (error) {
      if (!document.hidden) leave(base);
    } finally {
      stop.abort();
      document.removeEventListener("visibilitychange", hide);
    }
    if (!document.hidden) await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}
