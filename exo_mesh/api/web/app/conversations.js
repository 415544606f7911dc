// Conversations, kept in this browser only: one entry of localStorage each.
const PREFIX = "exo.conversation.";

export function newConversation(model = "") {
  const settings = { system: "", temperature: "", top_p: "", max_tokens: "" };
  return { id: crypto.randomUUID?.() ?? randomId(), title: "", model, settings, messages: [], running: null, updated: Date.now() };
}

/** crypto.randomUUID exists only on HTTPS and localhost. */
export function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** All of them, the newest first. */
export function listConversations() {
  const found = [];
  for (let index = 0; index < localStorage.length; index += 1) {
    const name = localStorage.key(index);
    if (name.startsWith(PREFIX)) found.push(readConversation(name.slice(PREFIX.length)));
  }
  return found.filter(Boolean).sort((one, other) => other.updated - one.updated);
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
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export function deleteConversation(id) {
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
