// Stores the conversations, in this browser only: one entry of localStorage for each.
export const PREFIX = "exo.conversation.";

export function newConversation(model = "") {
  const settings = { system: "", temperature: "", top_p: "", top_k: "", min_p: "", max_tokens: "", seed: "" };
  return { id: crypto.randomUUID?.() ?? randomId(), title: "", model, settings, messages: [], running: null, updated: Date.now() };
}

/** A random id. crypto.randomUUID exists only on HTTPS and localhost, so another way is needed elsewhere. */
export function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

let kept = null; // the cached list; cleared when this tab or another tab writes
addEventListener("storage", () => { kept = null; });

/** All conversations, the newest first. */
export function listConversations() {
  if (kept) return kept;
  const found = [];
  for (let index = 0; index < localStorage.length; index += 1) {
    const name = localStorage.key(index);
    if (name.startsWith(PREFIX)) found.push(readConversation(name.slice(PREFIX.length)));
  }
  kept = found.filter(Boolean).sort((one, other) => other.updated - one.updated);
  return kept;
}

export function readConversation(id) {
  try {
    const read = JSON.parse(localStorage.getItem(PREFIX + id));
    return Array.isArray(read?.messages) ? read : null;
  } catch {
    return null;
  }
}

/** Saves a conversation. Returns false if the browser has no room left. */
export function saveConversation(conversation) {
  if (!conversation.messages.length) return true;
  kept = null;
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export function deleteConversation(id) {
  kept = null;
  localStorage.removeItem(PREFIX + id);
}

export function exportConversations() {
  return JSON.stringify({ format: "exo-mesh conversations 1", conversations: listConversations() }, null, 1);
}

/** Imports conversations from an exported text and returns their number. Raises for an invalid text. */
export function importConversations(text) {
  const { conversations } = JSON.parse(text);
  const taken = conversations.filter((one) => typeof one?.id === "string" && Array.isArray(one.messages));
  for (const one of taken) saveConversation({ ...newConversation(), ...one, running: null });
  return taken.length;
}
