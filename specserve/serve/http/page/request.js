// The body of a request, and the same request as curl and in Python.

import { $ } from "./dom.js";
import { ApiError, addressOf, needsKey } from "./api.js";

export const served = { model: null, hasChat: document.documentElement.dataset.hasChat === "true" };

const numberOf = (id, fallback) => {
  const value = $(id).valueAsNumber;
  return Number.isNaN(value) ? fallback : value;
};

// The tools that the model may call, a JSON list. Throws where it is none.
function tools() {
  const text = $("tools").value.trim();
  if (!text) return {};
  try {
    return { tools: JSON.parse(text) };
  } catch (error) {
    throw new ApiError(0, `The tools are not JSON: ${error.message}.`);
  }
}

export function settings() {
  const speculation = $("speculation").value;
  return {
    temperature: numberOf("temperature", 1),
    seed: Math.trunc(numberOf("seed", 0)),
    max_tokens: Math.trunc(numberOf("max-tokens", 200)),
    speculation: /^\d+$/.test(speculation) ? Number(speculation) : speculation,
    ...(served.hasChat && tools()),
  };
}

// Where to send a conversation, and what. A model without a chat template continues the last message.
export function requestFor(messages, options) {
  const told = { stream: true, return_draft_depths: true, return_tree: true };
  const model = served.model ? { model: served.model } : {};
  if (served.hasChat) return { path: "v1/chat/completions", body: { ...model, messages, ...options, ...told } };
  return { path: "v1/completions", body: { ...model, prompt: messages.at(-1).content, ...options, ...told } };
}

const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function asCurl({ path, body }) {
  const key = needsKey ? ' \\\n  -H "Authorization: Bearer $SPECSERVE_API_KEY"' : "";
  return `curl -N ${addressOf(path)}${key} \\\n  -H "Content-Type: application/json" \\\n`
    + `  -d ${shellQuoted(JSON.stringify(body, null, 2))}`;
}

const python = (value, indent) => JSON.stringify(value, null, 4)
  .replace(/("(?:[^"\\]|\\.)*")|\btrue\b|\bfalse\b|\bnull\b/g, (word, text) => text ?? { true: "True", false: "False", null: "None" }[word])
  .replaceAll("\n", `\n${" ".repeat(indent)}`);

const OWN = ["speculation", "return_draft_depths", "return_tree", "cache_salt"]; // not OpenAI's

export function asPython({ path, body }) {
  const isChat = path.includes("chat");
  const known = Object.entries(body).filter(([name]) => !OWN.includes(name));
  if (!body.model) known.unshift(["model", "any"]);
  const own = Object.fromEntries(Object.entries(body).filter(([name]) => OWN.includes(name)));
  const key = needsKey ? 'os.environ["SPECSERVE_API_KEY"]' : '"unused"';
  const fields = known.map(([name, value]) => `    ${name}=${python(value, 4)},\n`).join("");
  return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI\n\n`
    + `client = OpenAI(base_url="${addressOf("v1")}", api_key=${key})\n`
    + `stream = client.${isChat ? "chat.completions" : "completions"}.create(\n${fields}    extra_body=${python(own, 4)},\n)\n`
    + `for chunk in stream:\n    for choice in chunk.choices:\n`
    + `        print(${isChat ? 'choice.delta.content or ""' : "choice.text"}, end="")\n`;
}
