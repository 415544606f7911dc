// The unmodified openai-node client reads one stream: node waiting_client.mjs BASE_URL BODY. Writes the text it got.
// The package is looked for in OPENAI_NODE_DIR/node_modules.
import { createRequire } from "node:module";
import { join } from "node:path";

const require = createRequire(join(process.env.OPENAI_NODE_DIR, "package.json"));
const { OpenAI } = require("openai");

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "unused", maxRetries: 0, timeout: 60_000 });
let text = "";
for await (const chunk of await client.chat.completions.create(JSON.parse(process.argv[3]))) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
process.stdout.write(text);
