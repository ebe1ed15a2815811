// Vercel's AI SDK: `node running_ai.mjs PROVIDER URL`, where a provider is openai (/v1/responses), chat, compatible or
// anthropic. A text, a stream, a call with its result, an object, and a second turn; prints what came back as JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const [provider, baseURL] = process.argv.slice(2);
const given = { baseURL, apiKey: "unused" };
const models = {
  openai: () => createOpenAI(given)("echo"),
  chat: () => createOpenAI(given).chat("echo"),
  compatible: () =>
    createOpenAICompatible({ ...given, name: "quire", supportsStructuredOutputs: true, includeUsage: true })("echo"),
  anthropic: () => createAnthropic(given)("echo"),
};
const to = { model: models[provider](), maxRetries: 0, maxOutputTokens: 200 };
const weather = tool({
  description: "Of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `rain in ${city}`,
});
const found = { text: (await generateText({ ...to, prompt: "Tell." })).text, stream: "" };
const streamed = streamText({ ...to, prompt: "Tell.", onError: ({ error }) => { throw error; } });
for await (const part of streamed.textStream) found.stream += part;
const messages = [{ role: "user", content: "Weather?" }];
const asked = { ...to, instructions: "Be kind.", tools: { weather }, stopWhen: isStepCount(3) };
const agent = await generateText({ ...asked, messages });
found.tool = agent.text;
const schema = z.object({ title: z.string(), number: z.number().int() });
found.page = (await generateText({ ...to, output: Output.object({ schema }), prompt: "Tell." })).output;
const more = [...messages, ...agent.responseMessages, { role: "user", content: "And now?" }];
found.again = (await generateText({ ...asked, messages: more })).text;
console.log(JSON.stringify(found));
