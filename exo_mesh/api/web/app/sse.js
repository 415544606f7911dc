// Reads server-sent events from a fetch, because EventSource can send neither a key nor a POST, and hides comments.

export class SilenceError extends Error {}

/** Yields {comment} or {id, data} until the stream ends. Raises SilenceError if nothing arrives for silenceMs. */
export async function* readEvents(reply, silenceMs) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await orSilence(reader.read(), silenceMs);
      if (done) return;
      rest += value;
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) yield parse(block);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  const event = { id: null, data: "", comment: null };
  for (const line of block.split("\n")) {
    if (line.startsWith(": ")) event.comment = line.slice(2);
    else if (line.startsWith("id: ")) event.id = line.slice(4);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event;
}

function orSilence(promise, silenceMs) {
  let timer;
  const silence = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new SilenceError(`nothing came for ${silenceMs} ms`)), silenceMs);
  });
  return Promise.race([promise, silence]).finally(() => clearTimeout(timer));
}
