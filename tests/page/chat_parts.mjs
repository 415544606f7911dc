// Runs pure parts of the chat in Node, in a copy of the page's folder, and writes what they return.
globalThis.sessionStorage = { getItem: () => null };
globalThis.localStorage = { getItem: () => null };
globalThis.location = { origin: "http://here", hash: "" };
globalThis.document = { hidden: true, addEventListener() {} };
const load = (name) => import(`./app/${name}.js`);
const [versions, thinking, context, files, talks, blocks] = await Promise.all(
  ["versions", "thinking", "context_use", "attachments", "conversations", "code_blocks"].map(load));

const user = (content) => ({ role: "user", content }), model = (content) => ({ role: "assistant", content });
const shown = (messages) => messages.map((one) => one.content).join(" ");
const again = (messages, index, ...added) => {
  const made = versions.opened(messages, index);
  return [...made.messages, { ...added[0], versions: made.versions }, ...added.slice(1)];
};
let tree = [user("q1"), model("a1"), user("q2"), model("a2")];
tree = again(tree, 3, model("a2b"));           // regenerated
tree = again(tree, 2, user("q2b"), model("a3")); // edited
tree = again(tree, 1, model("a1b"));
const walk = [shown(tree)];
for (const [index, step] of [[1, -1], [2, -1], [3, -1], [3, -1], [3, 1], [1, 1]]) {
  tree = versions.turned(tree, index, step);
  walk.push(shown(tree));
}
const places = tree.map(versions.placeOf);
const every = [...versions.everyMessage(tree)].map((one) => one.content).sort().join(" ");

const having = (thinking) => ({ capabilities: { thinking } });
const models = [undefined, having({ supported: false, toggle: true }), having({ supported: true }), having({ supported: true, toggle: true }),
  having({ supported: true, toggle: true, effort: true }), having({ supported: true, default_effort: "medium" })];
const now = new Date(2026, 10, 29, 15).getTime(), hours = (count) => ({ updated: now - count * 3600000 });
const utf16 = Uint8Array.from([0xff, 0xfe, 0x41, 0, 0xfc, 0]);
const answer = { role: "assistant", content: "four more", usage: { prompt_tokens: 90, completion_tokens: 10 } };
process.stdout.write(JSON.stringify({
  walk, places, every,
  choices: models.map(thinking.thinkingChoices),
  fields: ["", "on", "off", "high", "nonsense"].map((choice) => thinking.thinkingFields(choice, models[4])),
  tokens: [context.tokensOf([]), context.tokensOf([user("a"), answer]), context.tokensOf([user("a"), answer, user("12345678")], "1234")],
  laps: [context.perLap(undefined), context.perLap(answer.usage),
    context.perLap({ completion_tokens: 30, completion_tokens_details: { accepted_prediction_tokens: 20 } })],
  limits: [context.contextLimit(undefined, null), context.contextLimit({ id: "m", context_length: 9 }, null),
    context.contextLimit({ id: "m", context_length: 9 }, { instances: { a: { model: "m", context_limit: 4 }, b: { model: "n", context_limit: 5 } } })],
  sent: files.withFiles("Why?", [{ name: "a.md", text: "x\n```\ny\n" }, { name: "b.txt", text: "z" }]),
  decoded: [utf16, new TextEncoder().encode("grün"), Uint8Array.from([0xff, 0x41]), Uint8Array.from([0x41, 0])].map((one) => files.decoded(one.buffer)),
  dates: talks.byDate([hours(1), hours(14), hours(16), hours(60), hours(24 * 20), hours(24 * 99), { ...hours(2), pinned: true }], now).map(([name, list]) => [name, list.length]),
  names: ["py", "c++", "HTML", "", undefined, "js {1,2}", "brainfuck", "rust,ignore"].map(blocks.languageOf),
}), () => process.exit(0));
