// The same recipe by OpenAI's client for JavaScript, streamed: `npm install openai`, then
// `node examples/extraction.mjs http://127.0.0.1:8000/v1`.
import OpenAI from "openai";

const schema = {
  type: "object",
  properties: {
    title: { type: "string", maxLength: 40 },
    minutes: { type: "integer", minimum: 0, maximum: 600 },
  },
  required: ["title", "minutes"],
  additionalProperties: false,
};
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "unused", maxRetries: 0 });
const stream = await client.chat.completions.create({
  model: "tiny",
  messages: [{ role: "user", content: "Bread: 500 g of flour. Bake it for 40 minutes. What does this recipe say?" }],
  response_format: { type: "json_schema", json_schema: { name: "recipe", schema, strict: true } },
  max_tokens: 200,
  seed: 1,
  stream: true,
});
let text = "";
for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
console.log(JSON.stringify(JSON.parse(text)));
