// Keeps the conversations in this browser's IndexedDB, and all of them in memory: reading is immediate, writing is not.
import { everyMessage } from "./versions.js";

const OLD_PREFIX = "exo.conversation."; // entries of localStorage, where versions before this one kept conversations
const STORE = "conversations";
const all = new Map(); // id → conversation
const listeners = new Set();
const channel = new BroadcastChannel("exo-mesh.conversations");
let database = null; // null: this browser keeps nothing, so conversations end with the page
let sorted = null;

export function newConversation(model = "") {
  const settings = { system: "", temperature: "", top_p: "", top_k: "", min_p: "", max_tokens: "", seed: "", thinking: "", web: false };
  return { id: crypto.randomUUID?.() ?? randomId(), title: "", model, settings, messages: [], running: null, pinned: false, updated: Date.now() };
}

/** A random id. crypto.randomUUID exists only on HTTPS and localhost, so another way is needed elsewhere. */
export function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** listener(id): called when another tab has written or deleted a conversation. */
export function onWritten(listener) {
  listeners.add(listener);
}

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

/** Reads all conversations; nothing else of this module may be called before it has ended. */
export async function openConversations() {
  try {
    const asked = indexedDB.open("exo-mesh", 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE, { keyPath: "id" });
    database = await done(asked);
    for (const one of await done(database.transaction(STORE).objectStore(STORE).getAll())) all.set(one.id, one);
  } catch {
    database = null;
  }
  await moveOld();
}

async function moveOld() {
  for (const name of Object.keys(localStorage).filter((one) => one.startsWith(OLD_PREFIX))) {
    let old = null;
    try {
      old = JSON.parse(localStorage.getItem(name));
    } catch {} // not a conversation
    if (!Array.isArray(old?.messages) || all.has(old.id) || (await saveConversation({ ...newConversation(), ...old }))) {
      localStorage.removeItem(name);
    }
  }
}

/** All conversations, the newest first. The list is the same object until one of them is written. */
export function listConversations() {
  sorted ??= [...all.values()].sort((one, other) => other.updated - one.updated);
  return sorted;
}

export function readConversation(id) {
  return all.get(id) ?? null;
}

/** Saves a conversation. Resolves to false if the browser has no room left; this page still has it then. */
export async function saveConversation(conversation) {
  if (!conversation.messages.length) return true;
  all.set(conversation.id, conversation);
  sorted = null;
  return write(conversation.id, (store) => store.put(conversation));
}

export function deleteConversation(id) {
  all.delete(id);
  sorted = null;
  return write(id, (store) => store.delete(id));
}

async function write(id, act) {
  if (!database) return false;
  try {
    const transaction = database.transaction(STORE, "readwrite");
    const written = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    act(transaction.objectStore(STORE));
    transaction.commit(); // at once: the page may be closed
    await written;
    channel.postMessage(id);
    return true;
  } catch {
    return false;
  }
}

channel.onmessage = async ({ data: id }) => {
  const found = await done(database.transaction(STORE).objectStore(STORE).get(id));
  if (found) all.set(id, found);
  else all.delete(id);
  sorted = null;
  for (const listener of listeners) listener(id);
};

const texts = new WeakMap(); // conversation → {updated, text}: what a search looks through

/** The conversations whose title or messages contain each word. */
export function search(words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.length) return listConversations();
  return listConversations().filter((one) => {
    const text = textOf(one);
    return wanted.every((word) => text.includes(word));
  });
}

function textOf(conversation) {
  const known = texts.get(conversation);
  if (known?.updated === conversation.updated && known.title === conversation.title) return known.text;
  const parts = [conversation.title];
  for (const { content, files } of everyMessage(conversation.messages)) parts.push(content ?? "", ...(files ?? []).map((file) => file.name));
  const text = parts.join("\n").toLowerCase();
  texts.set(conversation, { updated: conversation.updated, title: conversation.title, text });
  return text;
}

/** The groups of a list by date: [[name, conversations]], without empty ones. now: milliseconds. */
export function byDate(list, now) {
  const midnight = new Date(now).setHours(0, 0, 0, 0), day = 86400000;
  const names = ["pinned", "today", "yesterday", "week", "month", "older"];
  const groups = new Map(names.map((name) => [name, []]));
  for (const one of list) {
    const age = midnight - one.updated;
    const name = one.pinned ? "pinned" : age <= 0 ? "today" : age <= day ? "yesterday" : age <= 7 * day ? "week" : age <= 30 * day ? "month" : "older";
    groups.get(name).push(one);
  }
  return [...groups].filter(([, found]) => found.length);
}

export function exported(list) {
  return JSON.stringify({ format: "exo-mesh conversations 1", conversations: list }, null, 1);
}

/** Imports conversations from an exported text and returns their number. Raises for an invalid text. */
export async function importConversations(text) {
  const { conversations } = JSON.parse(text);
  const taken = conversations.filter((one) => typeof one?.id === "string" && Array.isArray(one.messages));
  const saved = await Promise.all(taken.map((one) => saveConversation({ ...newConversation(), ...one, running: null })));
  return saved.filter(Boolean).length;
}

/** The shown messages of a conversation as Markdown. names: of the user and of the model. */
export function markdownOf(conversation, names) {
  const said = conversation.messages.filter((one) => one.content || one.files?.length).map((one) => {
    const files = (one.files ?? []).map((file) => `- ${file.name}\n`).join("");
    return `## ${one.role === "user" ? names.user : one.model || names.model}\n\n${files}${files && "\n"}${one.content}\n`;
  });
  return `# ${conversation.title}\n\n${said.join("\n")}`;
}
