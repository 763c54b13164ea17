// The server's API as the page uses it: the key, JSON, the stream of an answer, and the series of /metrics.

const STORED = "specserve-key";

export const needsKey = document.documentElement.dataset.needsKey === "true";
export const getKey = () => sessionStorage.getItem(STORED) ?? "";
export const setKey = (key) => (key ? sessionStorage.setItem(STORED, key) : sessionStorage.removeItem(STORED));

// A path of the API as an address, without the key that the page's own address may have: browsers fetch none of those.
export const addressOf = (path) => new URL(path, location.origin + location.pathname);

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, options = {}) {
  const key = getKey();
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let reply;
  try {
    reply = await fetch(addressOf(path), { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => ({}));
  throw new ApiError(reply.status, body.error?.message ?? `The server answered ${reply.status}.`);
}

export const getJson = async (path) => (await call(path)).json();

// The steps of an answer, as they come: {text, reasoning, calls, tokens, depths, tree, finish}.
export async function* stream({ path, body }, signal) {
  const headers = { "Content-Type": "application/json" };
  const reply = await call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new ApiError(0, "The connection was lost before the answer ended.");
    });
    if (done) return;
    const events = (rest + value).split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: ?/, "");
      if (!event.startsWith("data:") || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(500, chunk.error.message);
      for (const choice of chunk.choices) yield stepOf(choice);
    }
  }
}

const stepOf = (choice) => ({
  text: choice.text ?? choice.delta?.content ?? "",
  reasoning: choice.delta?.reasoning_content ?? "",
  calls: choice.delta?.tool_calls ?? [],
  tokens: choice.draft_depths?.tokens ?? [],
  depths: choice.draft_depths?.depths ?? [],
  tree: choice.tree ?? null,
  finish: choice.finish_reason,
});

// The series of /metrics that the page draws.
export async function scrape() {
  const found = { time: performance.now() / 1000, perDepth: [], adapters: {}, versions: {} };
  const names = {
    "vllm:generation_tokens_total": "tokens",
    "vllm:spec_decode_num_drafts_total": "steps",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "specserve:sequence_cut_steps_total": "cut",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "usage",
    "specserve:pages": "pages",
    "specserve:pages_cached": "cached",
    "specserve:programs_left": "programsLeft",
    "specserve:learn_drift": "drift",
  };
  const ofAdapters = {
    "specserve:adapter_steps_total": "steps",
    "specserve:adapter_accepted_tokens_total": "accepted",
    "specserve:adapter_cut_steps_total": "cut",
  };
  const ofVersions = { "specserve:learn_version": "isServing", "specserve:learn_live_tau": "tau" };
  const text = await (await call("metrics")).text();
  for (const line of text.split("\n")) {
    const match = /^([a-z][\w:]*)(?:\{(.*)\})? (\S+)$/i.exec(line);
    if (!match) continue;
    const [, name, labels = "", value] = match;
    if (names[name]) found[names[name]] = (found[names[name]] ?? 0) + Number(value);
    const position = name === "vllm:spec_decode_num_accepted_tokens_per_pos_total" && /position="(\d+)"/.exec(labels);
    if (position) found.perDepth[position[1]] = Number(value);
    const adapter = ofAdapters[name] && /adapter="((?:[^"\\]|\\.)*)"/.exec(labels);
    const version = ofVersions[name] && /version="([^"]*)"/.exec(labels);
    if (version) (found.versions[version[1]] ??= {})[ofVersions[name]] = Number(value);
    if (adapter) (found.adapters[adapter[1]] ??= {})[ofAdapters[name]] = Number(value);
  }
  return found;
}
