// Streams an answer with Anthropic's own client: npm install @anthropic-ai/sdk; node ask_anthropic.mjs [URL MODEL]
import Anthropic from "@anthropic-ai/sdk";

const [baseURL = "http://127.0.0.1:52415", model = "exo-mesh-demo"] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey: "unused" });
const messages = [{ role: "user", content: "Count from 7 to 12." }];
const stream = client.messages.stream({ model, max_tokens: 100, messages, temperature: 0 });
stream.on("text", (text) => process.stdout.write(text));
await stream.finalMessage();
console.log();
