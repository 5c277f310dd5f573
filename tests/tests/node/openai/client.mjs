// Checks the official `openai` package for Node against a running cluster: conversations, tools, parsed JSON,
// responses, streams and errors.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const { values } = parseArgs({ options: { url: { type: "string" }, model: { type: "string" } } });
const client = new OpenAI({ baseURL: `${values.url}/v1`, apiKey: "unused", maxRetries: 0, timeout: 60_000 });

const PROMPT = "Write a Python function that reverses a list.";
const chat = { model: values.model, messages: [{ role: "user", content: PROMPT }], max_completion_tokens: 32, seed: 7 };
const response = { model: values.model, input: PROMPT, max_output_tokens: 32, seed: 7 };

const Ticket = z.object({ kind: z.enum(["bug", "question"]), urgent: z.boolean() });

const weather = {
  name: "get_weather",
  description: "The weather of a city",
  strict: true,
  parameters: {
    type: "object",
    properties: { city: { type: "string", enum: ["Bern", "Zürich"] } },
    required: ["city"],
    additionalProperties: false,
  },
};

const checks = {
  async "a conversation is answered and streamed"() {
    const complete = await client.chat.completions.create(chat);
    assert.equal(complete.usage.completion_tokens, 32);
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    assert.equal(text, complete.choices[0].message.content);
  },

  async "a completion is answered and streamed"() {
    const request = { model: values.model, prompt: PROMPT, max_tokens: 32, seed: 7, logprobs: 1 };
    const complete = await client.completions.create(request);
    assert.equal(complete.choices[0].logprobs.tokens.length, 32);
    let text = "";
    for await (const chunk of await client.completions.create({ ...request, stream: true })) {
      text += chunk.choices[0]?.text ?? "";
    }
    assert.equal(text, complete.choices[0].text);
  },

  async "tools are called, complete and streamed"() {
    const tools = [{ type: "function", function: weather }];
    for (const tool_choice of ["required", { type: "function", function: { name: "get_weather" } }]) {
      const request = { ...chat, tools, tool_choice, max_completion_tokens: 400 };
      const complete = (await client.chat.completions.create(request)).choices[0].message.tool_calls;
      assert.ok(["Bern", "Zürich"].includes(JSON.parse(complete[0].function.arguments).city));
      const streamed = (await client.chat.completions.stream(request).finalMessage()).tool_calls;
      const summary = (calls) => calls.map((call) => [call.type, call.function.name, call.function.arguments]);
      assert.deepEqual(summary(streamed), summary(complete));
      const { tool_calls, ...plain } = (await client.chat.completions.create({ ...request, disable_spec_decode: true })).choices[0].message;
      assert.equal(plain.content, null);
      assert.deepEqual(summary(tool_calls), summary(complete));
    }
  },

  async "a parsed answer matches its schema"() {
    const request = { ...chat, max_completion_tokens: 120, response_format: zodResponseFormat(Ticket, "ticket") };
    const { parsed } = (await client.chat.completions.parse(request)).choices[0].message;
    assert.deepEqual(Ticket.parse(parsed), parsed);
    const again = await client.responses.parse({ ...response, max_output_tokens: 120, text: { format: zodTextFormat(Ticket, "ticket") } });
    assert.deepEqual(again.output_parsed, parsed);
  },

  async "a streamed response equals the complete one and can be continued"() {
    const complete = await client.responses.create(response);
    const events = [];
    const stream = client.responses.stream(response).on("event", (event) => events.push(event.type));
    const final = await stream.finalResponse();
    assert.equal(final.output_text, complete.output_text);
    assert.equal(events[0], "response.created");
    const second = await client.responses.create({ ...response, input: "Go on.", previous_response_id: complete.id });
    assert.ok(second.output_text);
    assert.equal((await client.responses.retrieve(second.id)).output_text, second.output_text);
  },

  async "a response calls tools and reads their outputs"() {
    const request = { ...response, tools: [{ type: "function", ...weather }], tool_choice: "required", max_output_tokens: 400 };
    const complete = await client.responses.create(request);
    const summary = (answer) => answer.output.map((item) => [item.type, item.name, item.arguments, item.status]);
    assert.deepEqual(summary(await client.responses.stream(request).finalResponse()), summary(complete));
    assert.ok(complete.output.every((item) => item.type === "function_call"));
    const outputs = complete.output.map((item) => ({ type: "function_call_output", call_id: item.call_id, output: "sunny" }));
    const resent = await client.responses.create({ ...response, input: [{ role: "user", content: PROMPT }, ...complete.output, ...outputs] });
    const stored = await client.responses.create({ ...response, input: outputs, previous_response_id: complete.id });
    assert.equal(resent.output_text, stored.output_text);
  },

  async "errors have their own classes"() {
    const field = (param) => (error) => error.param === param;
    await assert.rejects(client.chat.completions.create({ ...chat, model: "nobody" }), OpenAI.NotFoundError);
    await assert.rejects(client.chat.completions.create({ ...chat, temperature: 3 }), field("temperature"));
    await assert.rejects(client.responses.create({ ...response, tools: [{ type: "web_search" }] }), field("tools[0].type"));
    assert.ok((await client.chat.completions.create(chat)).choices[0].message.content);
  },
};

let failures = 0;
for (const [title, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok    ${title}`);
  } catch (error) {
    failures += 1;
    console.log(`FAIL  ${title}\n${error?.stack ?? error}`);
  }
}
const { version } = JSON.parse(readFileSync(new URL("node_modules/openai/package.json", import.meta.url)));
const total = Object.keys(checks).length;
console.log(`openai (Node) ${version}: ${total - failures} of ${total} checks passed`);
process.exit(failures === 0 ? 0 : 1);
