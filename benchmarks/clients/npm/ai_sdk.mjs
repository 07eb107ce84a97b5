// Vercel's AI SDK over each of the three APIs. Prints a line of JSON for each step, as the scripts in ../pypi do.

import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { CLIENTS_URL: url, CLIENTS_MODEL: model } = process.env;
const baseURL = `${url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const providers = {
  responses: openai.responses(model),
  chat: openai.chat(model),
  compatible: createOpenAICompatible({
    name: "roseinfer",
    baseURL,
    includeUsage: true,
    supportsStructuredOutputs: true,
  })(model),
  anthropic: createAnthropic({ baseURL, apiKey: "none" })(model),
};
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.enum(["Oslo"]) }),
  execute: async ({ city }) => `${city}: rain`,
});
const HELLO = "Say hello.";
const CALL = "Please call the tool weather.";
const person = z.object({ name: z.string(), age: z.number().int() });

const steps = {
  async plain(model) {
    const answer = await generateText({ model, prompt: HELLO, maxRetries: 0 });
    assert.equal(answer.finishReason, "stop");
  },
  async stream(model) {
    const errors = [];
    const answer = streamText({ model, prompt: HELLO, maxRetries: 0, onError: ({ error }) => errors.push(error) });
    await answer.consumeStream();
    assert.deepEqual(errors, []);
    assert.equal(await answer.finishReason, "stop");
  },
  async agent(model) {
    const answer = await generateText({
      model, prompt: CALL, tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0,
    });
    assert.equal(answer.steps.length, 2);
    assert.equal(answer.steps[0].toolResults[0].output, "Oslo: rain");
  },
  async streamedAgent(model) {
    const answer = streamText({ model, prompt: CALL, tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0 });
    await answer.consumeStream();
    assert.equal((await answer.steps).length, 2);
  },
  async requiredTool(model) {
    const answer = await generateText({
      model, prompt: HELLO, tools: { weather }, toolChoice: "required", maxRetries: 0,
    });
    assert.equal(answer.toolCalls[0].toolName, "weather");
  },
  async object(model) {
    const answer = await generateText({
      model, prompt: HELLO, output: Output.object({ schema: person }), maxRetries: 0,
    });
    assert.equal(typeof answer.output.age, "number");
  },
};

for (const [api, provided] of Object.entries(providers)) {
  for (const [name, step] of Object.entries(steps)) {
    let error = null;
    try {
      await step(provided);
    } catch (raised) {
      error = `${raised}`;
    }
    console.log(`{"step": ${JSON.stringify(`${api} ${name}`)}, "error": ${JSON.stringify(error)}}`);
  }
}
