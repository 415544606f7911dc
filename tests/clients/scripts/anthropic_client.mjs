// Anthropic's client for Node: messages, a stream, a tool, thinking, counting, errors, models. Arguments: URL MODEL.
// Prints one JSON object.
import { createRequire } from "node:module";
import path from "node:path";

const require = createRequire(path.join(process.env.ANTHROPIC_NODE_DIR, "package.json"));
const { default: Anthropic } = require("@anthropic-ai/sdk");

const [baseURL, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey: "unused", maxRetries: 0 });
const asked = { model, max_tokens: 60, temperature: 0 };
const count = { ...asked, messages: [{ role: "user", content: "Count from 7 to 12." }] };
const tool = {
  name: "get_weather",
  description: "Tells the weather of a city.",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};
const question = { role: "user", content: "What is the weather in Paris?" };
const weather = { ...asked, messages: [question], tools: [tool] };
const wordsOf = (message) => message.content.map((block) => block.text ?? "").join("");

const whole = await client.messages.create(count);
const events = [];
const stream = client.messages.stream(count);
stream.on("streamEvent", (event) => events.push(event.type));
const streamed = await stream.finalMessage();
const called = await client.messages.stream({ ...weather, tool_choice: { type: "any" } }).finalMessage();
const call = called.content.at(-1);
const result = { type: "tool_result", tool_use_id: call.id, content: "18 degrees in Paris" };
const history = [question, { role: "assistant", content: called.content }, { role: "user", content: [result] }];
const answer = await client.messages.create({ ...weather, messages: history });
const thinking = { type: "enabled", budget_tokens: 20 };
const thought = await client.messages.stream({ ...count, thinking }).finalMessage();
const counted = await client.messages.countTokens({ model, messages: count.messages });
const refused = await client.messages.create({ ...count, model: "nobody" }).catch((error) => error);
const models = [];
for await (const one of client.models.list()) models.push(one.id);
const seen = {
  chat: [wordsOf(whole), whole.stop_reason],
  streamed: [wordsOf(streamed), streamed.usage.output_tokens === whole.usage.output_tokens],
  events: [...new Set(events)],
  call: [call.name, call.input, called.stop_reason],
  answer: wordsOf(answer),
  thinking: thought.content.map((block) => block.type),
  counted: counted.input_tokens === whole.usage.input_tokens + (whole.usage.cache_read_input_tokens ?? 0),
  error: [refused.constructor.name, refused.error.error.type, refused.requestID === refused.error.request_id],
  models: models.includes(model),
};
console.log(JSON.stringify(seen));
