// Versions of a message: each with the messages that followed it. A conversation is the list of the messages that are
// shown; the first message of each choice keeps the other tails, so the list is a tree. Pure.

/** The place of a message among its versions: {at, of}, or null for the only one. */
export function placeOf({ versions }) {
  if (!versions) return null;
  const at = versions.before.length;
  return { at, of: at + 1 + versions.after.length };
}

/** All tails that begin at this index, and the index of the one that is shown. */
function tailsFrom(messages, index) {
  const [{ versions, ...head }, ...rest] = messages.slice(index);
  const { before = [], after = [] } = versions ?? {};
  return { tails: [...before, [head, ...rest], ...after], at: before.length };
}

function withTail(messages, index, tails, at) {
  const [head, ...rest] = tails[at];
  const versions = { before: tails.slice(0, at), after: tails.slice(at + 1) };
  return [...messages.slice(0, index), tails.length > 1 ? { ...head, versions } : head, ...rest];
}

/** The messages with the version `step` places further at this index; the same messages if there is none. */
export function turned(messages, index, step) {
  const { tails, at } = tailsFrom(messages, index);
  return at + step in tails ? withTail(messages, index, tails, at + step) : messages;
}

/** The messages before this index, and the versions that a new message there must get to be the last of them. */
export function opened(messages, index) {
  return { messages: messages.slice(0, index), versions: { before: tailsFrom(messages, index).tails, after: [] } };
}

/** Every message of the tree, the shown ones and the others, in no particular order. */
export function* everyMessage(messages) {
  for (const message of messages) {
    yield message;
    for (const tail of [...(message.versions?.before ?? []), ...(message.versions?.after ?? [])]) yield* everyMessage(tail);
  }
}
