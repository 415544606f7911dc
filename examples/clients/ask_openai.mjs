// Streams an answer with OpenAI's own client: npm install openai; node ask_openai.mjs [URL MODEL]
import OpenAI from "openai";

const [url = "http://127.0.0.1:52415", model = "exo-mesh-demo"] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused" });
const messages = [{ role: "user", content: "Count from 7 to 12." }];
for await (const chunk of await client.chat.completions.create({ model, messages, temperature: 0, stream: true })) {
  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
}
console.log();
