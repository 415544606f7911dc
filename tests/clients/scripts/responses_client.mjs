// OpenAI's client for Node with the Responses API. Arguments: URL MODEL. Prints one JSON object.
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const home = path.join(process.env.OPENAI_NODE_DIR, "package.json");
const { default: OpenAI } = await import(pathToFileURL(createRequire(home).resolve("openai")).href);

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const asked = { model, temperature: 0, max_output_tokens: 60 };
const count = { ...asked, input: "Count from 7 to 12." };
const question = "What is the weather in Paris?";
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", name: "get_weather", description: "Tells the weather of a city.", parameters, strict: false }];

const seen = {};
const whole = await client.responses.create(count);
seen.chat = [whole.output_text, whole.status];

const kinds = [];
for await (const event of await client.responses.create({ ...count, stream: true })) {
  if (event.sequence_number !== kinds.length) throw new Error(`event ${event.sequence_number} at ${kinds.length}`);
  kinds.push(event.type.replace("response.", ""));
}
seen.events = [...new Set(kinds)];
let streamed = "";
const stream = client.responses.stream(count).on("response.output_text.delta", (event) => (streamed += event.delta));
const final = await stream.finalResponse();
seen.streamed = [streamed, final.output_text, final.usage.total_tokens === whole.usage.total_tokens];

const called = await client.responses.create({ ...asked, input: question, tools, tool_choice: "required" });
const call = called.output.at(-1);
seen.call = [call.name, JSON.parse(call.arguments)];
const output = { type: "function_call_output", call_id: call.call_id, output: "18 degrees in Paris" };
const answer = await client.responses.create({ ...asked, tools, input: [output], previous_response_id: called.id });
seen.answer = answer.output_text;

const thought = await client.responses.create({ ...count, reasoning: { effort: "high", summary: "auto" } });
seen.reasoning = [thought.output[0].type, thought.output[0].summary[0].text.length > 0];
seen.read = (await client.responses.retrieve(whole.id)).output_text;
seen.items = (await client.responses.inputItems.list(called.id)).data.map((item) => item.content[0].text);
await client.responses.delete(whole.id);
try {
  await client.responses.retrieve(whole.id);
} catch (error) {
  seen.error = [error.constructor.name, error.code];
}
console.log(JSON.stringify(seen));
