// openai-node reads streams that can be come back to: what openai_resumable.py does, by the other SDK.
// `node openai_resumable.mjs PACKAGES URL BODIES`, where the folder PACKAGES has the SDK in its node_modules.

import { createRequire } from "node:module";

const [packages, url, bodies] = process.argv.slice(2);
const OpenAI = createRequire(`${packages}/`)("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });

async function read(body) {
  const chats = "messages" in body;
  const seen = { text: "", reason: null, tokens: null, error: null };
  try {
    const create = chats ? client.chat.completions : client.completions;
    for await (const chunk of await create.create(body)) {
      if (chunk.usage) seen.tokens = chunk.usage.completion_tokens;
      for (const choice of chunk.choices) {
        seen.text += (chats ? choice.delta.content : choice.text) ?? "";
        seen.reason = choice.finish_reason ?? seen.reason;
      }
    }
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    seen.error = error.code;
  }
  return seen;
}

const seen = [];
for (const body of JSON.parse(bodies)) seen.push(await read(body));
console.log(JSON.stringify(seen));
