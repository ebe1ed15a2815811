// As replaying.py, by Vercel's AI SDK: `node replaying_ai.mjs PROVIDER CHAT URL ...`.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, tool } from "ai";
import { readFileSync } from "node:fs";

const [provider, chat, ...urls] = process.argv.slice(2);
const given = JSON.parse(readFileSync(chat));
const makers = {
  ai_responses: (to) => createOpenAI(to)("echo"),
  ai_compatible: (to) => createOpenAICompatible({ ...to, name: "quire" })("echo"),
  ai_anthropic: (to) => createAnthropic(to)("echo"),
};
const tools = Object.fromEntries(
  given.tools.map(({ function: { name, description, parameters } }) => [
    name, tool({ description, inputSchema: jsonSchema(parameters) }),
  ]),
);
const names = {};
const messages = given.messages.slice(1).map((message) => {
  for (const call of message.tool_calls ?? []) names[call.id] = call.function.name;
  if (message.tool_calls)
    return {
      role: "assistant",
      content: message.tool_calls.map((call) => ({
        type: "tool-call", toolCallId: call.id, toolName: call.function.name, input: JSON.parse(call.function.arguments),
      })),
    };
  if (message.role !== "tool") return message;
  const [toolCallId, output] = [message.tool_call_id, { type: "text", value: message.content }];
  return { role: "tool", content: [{ type: "tool-result", toolCallId, toolName: names[toolCallId], output }] };
});
const counts = [];
for (const url of urls) {
  const model = makers[provider]({ baseURL: `${url}/v1`, apiKey: "unused" });
  const seen = [];
  for (const [i, { role }] of messages.entries()) {
    if (role === "assistant") continue;
    const { usage } = await generateText({
      model, tools, instructions: `${provider} ${given.messages[0].content}`, messages: messages.slice(0, i + 1),
      maxOutputTokens: 16, maxRetries: 0, providerOptions: { openai: { store: false } },
    });
    seen.push([usage.inputTokens, usage.inputTokenDetails.cacheReadTokens]);
  }
  counts.push(seen);
}
console.log(JSON.stringify(counts));
