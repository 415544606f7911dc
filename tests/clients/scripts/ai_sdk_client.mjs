// The AI SDK: text, a stream, an object by schema, and a tool. Arguments: URL MODEL. Prints one JSON object.
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const home = path.join(process.env.AI_SDK_DIR, "package.json");
const load = async (name) => import(pathToFileURL(createRequire(home).resolve(name)).href);
const { generateObject, generateText, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const [base, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "exo-mesh", baseURL: `${base}/v1`, supportsStructuredOutputs: true });
const model = provider(name);
const asked = { model, temperature: 0, maxRetries: 0, maxOutputTokens: 200 };

const chat = await generateText({ ...asked, prompt: "Count from 7 to 12." });
let streamed = "";
for await (const part of streamText({ ...asked, prompt: "Count from 7 to 12." }).textStream) streamed += part;
const schema = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150) });
const { object } = await generateObject({ ...asked, schema, prompt: "Make JSON: Anna is 7." });
const cities = [];
const weather = tool({
  description: "Tells the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => (cities.push(city), `18 degrees in ${city}`),
});
const tools = { get_weather: weather };
const answer = await generateText({ ...asked, tools, stopWhen: stepCountIs(3), prompt: "What is the weather in Paris?" });
console.log(JSON.stringify({ chat: chat.text, streamed, object, cities, answer: answer.text }));
