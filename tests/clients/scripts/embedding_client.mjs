// openai (Node): vectors. Arguments: URL MODEL. Prints one JSON object.
import OpenAI from "openai";

const [base, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "unused", maxRetries: 0 });
const input = ["The sky is blue.", "Grass is green."];
const packed = await client.embeddings.create({ model, input });
const plain = await client.embeddings.create({ model, input, encoding_format: "float" });
const same = packed.data.every((one, i) =>
  one.embedding.every((value, j) => Math.abs(value - plain.data[i].embedding[j]) < 1e-6));
console.log(JSON.stringify({
  same,
  length: Math.round(1e4 * Math.hypot(...packed.data[0].embedding)) / 1e4,
  tokens: plain.usage.total_tokens > 2,
}));
