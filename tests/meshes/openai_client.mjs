// The unmodified openai-node client against one peer: node openai_client.mjs BASE_URL. Writes what it saw as JSON lines.
// The package is looked for in OPENAI_NODE_DIR/node_modules.
import { createRequire } from "node:module";
import { join } from "node:path";

const require = createRequire(join(process.env.OPENAI_NODE_DIR, "package.json"));
const { OpenAI } = require("openai");

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "unused", maxRetries: 0, timeout: 60_000 });
const model = "exo-mesh-demo";
const count = [{ role: "user", content: "Count from 7 to 12." }];

const say = (name, value) => process.stdout.write(JSON.stringify({ name, value }) + "\n");

async function refused(request) {
  try {
    await request;
    return null;
  } catch (error) {
    const { status, code, param, message } = error;
    return { kind: error.constructor.name, status, code, param, message };
  }
}

const whole = await client.chat.completions.create({ model, messages: count });
say("chat", { content: whole.choices[0].message.content, finish: whole.choices[0].finish_reason, usage: whole.usage });

const streamed = { content: "", finish: null, usage: null };
const stream = await client.chat.completions.create({
  model, messages: count, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed.content += chunk.choices[0]?.delta?.content ?? "";
  streamed.finish = chunk.choices[0]?.finish_reason ?? streamed.finish;
  streamed.usage = chunk.usage ?? streamed.usage;
}
say("stream", streamed);

const scored = await client.chat.completions.create({ model, messages: count, logprobs: true, top_logprobs: 3 });
say("logprobs", scored.choices[0].logprobs.content);

const stopped = await client.chat.completions.create({ model, messages: count, stop: ", 10, 1" });
say("stop", { content: stopped.choices[0].message.content, finish: stopped.choices[0].finish_reason });

const drawn = [];
for (const seed of [1, 2, 1]) {
  const reply = await client.completions.create({
    model, prompt: "Zq", temperature: 1, frequency_penalty: 1, seed, ignore_eos: true,
  });
  drawn.push(reply.choices[0].text);
}
say("seed", drawn);

const short = await client.chat.completions.create({ model, messages: count, max_tokens: 5 });
say("length", { finish: short.choices[0].finish_reason, tokens: short.usage.completion_tokens });

const models = [];
for await (const entry of client.models.list()) models.push(entry.id);
say("models", { listed: models, retrieved: (await client.models.retrieve(model)).id });

say("unknown model", await refused(client.chat.completions.create({ model: "none", messages: count })));
say("unknown field", await refused(client.chat.completions.create({ model, messages: count, frobnicate: 1 })));
const long = [{ role: "user", content: "7 ".repeat(9000) }];
say("too long", await refused(client.chat.completions.create({ model, messages: long })));

const endless = await client.chat.completions.create({
  model, messages: count, stream: true, max_tokens: 8000, ignore_eos: true,
});
let chunks = 0;
for await (const chunk of endless) {
  chunks += chunk.choices.length;
  if (chunks === 3) say("streaming", chunks); // the test looks at the mesh now, and answers by a line
  if (chunks === 3) await new Promise((resolve) => process.stdin.once("data", resolve));
  if (chunks > 3) break; // leaving the loop closes the connection
}
say("closed", chunks);
await new Promise((resolve) => process.stdin.once("data", resolve)); // alive until the test has looked again
process.exit(0);
