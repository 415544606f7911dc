// Conversations, kept in this browser only: one entry of localStorage each.
export const PREFIX = "exo.conversation.";

export function newConversation(model = "") {
  const settings = { system: "", temperature: "", top_p: "", top_k: "", min_p: "", max_tokens: "", seed: "" };
  return { id: crypto.randomUUID?.() ?? randomId(), title: "", model, settings, messages: [], running: null, updated: Date.now() };
}

/** crypto.randomUUID exists only on HTTPS and localhost. */
export function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

let kept = null; // the list, until something is written here or in another tab
addEventListener("storage", () => { kept = null; });

/** All of them, the newest first. */
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

/** False if the browser has no room left. */
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

/** How many were taken from an exported text; raises on a text that is none. */
export function importConversations(text) {
  const { conversations } = JSON.parse(text);
  const taken = conversations.filter((one) => typeof one?.id === "string" && Array.isArray(one.messages));
  for (const one of taken) saveConversation({ ...newConversation(), ...one, running: null });
  return taken.length;
}
