// ollama (Node): all calls of its client. Arguments: URL MODEL. Prints one JSON object.
import { Ollama } from "ollama";

const [host, model] = process.argv.slice(2);
const client = new Ollama({ host, headers: { Authorization: `Bearer ${process.env.OLLAMA_API_KEY}` } });
const options = { temperature: 0, num_predict: 60 };
const messages = [{ role: "user", content: "Count from 7 to 12." }];
const asked = [{ role: "user", content: "What is the weather in Paris?" }];
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Tells the weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

async function joined(stream, pick) {
  let text = "";
  for await (const part of stream) text += pick(part);
  return text;
}

async function refused(call) {
  try {
    await call();
  } catch (error) {
    return [error.status_code, error.message];
  }
}

const seen = {};
seen.version = (await client.version()).version;
seen.listed = (await client.list()).models.map((one) => one.name);
seen.shown = (await client.show({ model })).capabilities;
seen.chat = (await client.chat({ model, messages, options })).message.content;
seen.streamed = await joined(
  await client.chat({ model, messages, options, stream: true }),
  (part) => part.message.content,
);
const called = await client.chat({ model, messages: asked, tools, options });
seen.tool = called.message.tool_calls[0].function;
const result = { role: "tool", content: '{"degrees": 18}', tool_name: "get_weather" };
seen.answer = (
  await client.chat({ model, messages: [...asked, called.message, result], tools, options })
).message.content;
seen.generated = (await client.generate({ model, prompt: messages[0].content, options })).response;
seen.generated_stream = await joined(
  await client.generate({ model, prompt: messages[0].content, options, stream: true }),
  (part) => part.response,
);
const stopped = await client.chat({ model, messages, options: { num_predict: 200 }, stream: true });
for await (const part of stopped) {
  stopped.abort();
  seen.stopped = part.done;
  break;
}
seen.embedded = [
  (await client.embed({ model, input: ["x", "y"], dimensions: 8 })).embeddings[1].length,
  (await client.embeddings({ model, prompt: "x" })).embedding.length > 8,
];
seen.running = (await client.ps()).models.map((one) => one.name);
seen.missing = {
  model: await refused(() => client.chat({ model: "nope", messages })),
  copy: await refused(() => client.copy({ source: model, destination: "x" })),
  create: await refused(() => client.create({ model: "x", from: model })),
  push: await refused(() => client.push({ model })),
  pull: await refused(() => client.pull({ model: "org/nowhere" })),
  delete: await refused(() => client.delete({ model: "nope" })),
};
console.log(JSON.stringify(seen));
