// What the usage of answers says: the context that a conversation takes, and tokens per lap. Pure.

/** Most tokens of prompt and answer: of the loaded instances if there are any, else of the model; 0 if unknown. */
export function contextLimit(model, live) {
  const loaded = Object.values(live?.instances ?? {}).filter((one) => one.model === model?.id && one.context_limit > 0);
  return loaded.length ? Math.max(...loaded.map((one) => one.context_limit)) : model?.context_length ?? 0;
}

const CHARACTERS = 4; // about so many make a token

/** {tokens, isExact}: what the last answer was counted as, and an estimate for the text after it. draft: not sent yet. */
export function tokensOf(messages, draft = "") {
  const last = messages.findLastIndex((one) => one.usage);
  const rest = messages.slice(last + 1).map((one) => (one.content ?? "") + (one.files ?? []).map((file) => file.text).join("")).join("") + draft;
  const { prompt_tokens: prompt = 0, completion_tokens: completion = 0 } = messages[last]?.usage ?? {};
  return { tokens: prompt + completion + Math.ceil(rest.length / CHARACTERS), isExact: !rest };
}

/** Tokens per lap of the ring, if drafts made it more than one; else null. */
export function perLap(usage) {
  const accepted = usage?.completion_tokens_details?.accepted_prediction_tokens ?? 0;
  return accepted > 0 ? usage.completion_tokens / Math.max(1, usage.completion_tokens - accepted) : null;
}
