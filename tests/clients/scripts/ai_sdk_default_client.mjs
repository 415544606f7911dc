// The AI SDK with its default provider for OpenAI, which uses the Responses API. Arguments: URL MODEL.
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const home = path.join(process.env.AI_SDK_DIR, "package.json");
const load = async (name) => import(pathToFileURL(createRequire(home).resolve(name)).href);
const { generateObject, generateText, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { z } = await load("zod");

const [base, name] = process.argv.slice(2);
const mesh = createOpenAI({ baseURL: `${base}/v1`, apiKey: "unused" });
const asked = { model: mesh(name), temperature: 0, maxRetries: 0, maxOutputTokens: 200 };
const question = "What is the weather in Paris?";

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
const stepwise = { ...asked, tools: { get_weather: weather }, stopWhen: stepCountIs(3), prompt: question };
const answer = await generateText(stepwise);
const sent = await generateText({ ...stepwise, providerOptions: { openai: { store: false } } });
const live = streamText(stepwise);
await live.consumeStream();
const thinking = { openai: { reasoningEffort: "high", reasoningSummary: "auto", forceReasoning: true } };
const thought = await generateText({ ...asked, temperature: undefined, prompt: "Count from 7 to 12.", providerOptions: thinking });
const texts = [answer.text, sent.text, await live.text];
console.log(JSON.stringify({ chat: chat.text, streamed, object, cities, texts, thought: (thought.reasoningText ?? "").length > 0 }));
