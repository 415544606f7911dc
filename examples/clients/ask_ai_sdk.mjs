// Gets a typed object with the AI SDK: npm install ai@6 @ai-sdk/openai-compatible@2 zod@4; node ask_ai_sdk.mjs [URL MODEL]
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject } from "ai";
import { z } from "zod";

const [url = "http://127.0.0.1:52415", name = "exo-mesh-demo"] = process.argv.slice(2);
const mesh = createOpenAICompatible({ name: "exo-mesh", baseURL: `${url}/v1`, supportsStructuredOutputs: true });
const schema = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150) });
const { object } = await generateObject({ model: mesh(name), schema, temperature: 0, prompt: "Make JSON: Anna is 7." });
console.log(object);
