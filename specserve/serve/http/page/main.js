// The page: what is chosen and typed, the key, and the state of the server.

import { ApiError, getJson, getKey, needsKey, scrape, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { $, make, number, tabs } from "./dom.js";
import { Live } from "./live.js";
import { Race } from "./race.js";
import { asCurl, asPython, served } from "./request.js";
import { TreePanel } from "./tree.js";

const POLL_MS = 1000;
const EXAMPLES = [
  "Write a Python function that returns the n-th Fibonacci number.",
  "What is the capital of France, and what is it known for?",
  "Give me five ideas for a rainy Sunday at home.",
];
const EXAMPLES_OF = { // the bundled target knows docstrings alone
  pydoc: [
    "Write a Python function that reverses a list.",
    "Implement `read_text` from `pathlib.Path` in Python.",
    "What does `json.dumps` do?",
  ],
};

const TOOLS = [{
  type: "function",
  function: {
    name: "weather",
    description: "The weather of a city today.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];

const panel = new TreePanel();
const live = new Live($("live"));
const views = { "tab-chat": new Chat(panel, sendResults), "tab-race": new Race(panel, live) };
let view = "tab-chat";
let running = null; // the AbortController of what runs
let language = "tab-curl";
let lastText = EXAMPLES[0];

// --- what runs ---

const say = (problem) => {
  $("problem").textContent = problem;
  $("problem").hidden = !problem;
};

function showControls() {
  const isRace = view === "tab-race";
  $("send").textContent = isRace ? "Start race" : "Send";
  $("send").disabled = Boolean(running);
  $("stop").hidden = !running;
  $("again").hidden = isRace || Boolean(running) || !views["tab-chat"].messages.length;
}

// Runs what `begin` sends; whether the server took it.
async function run(begin) {
  const mine = (running = new AbortController());
  say("");
  showControls();
  try {
    if (!served.model) await readModel();
    const sent = begin(mine.signal);
    showCode();
    await sent;
    return true;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    say(error.message);
    if (error.status === 401) openKey();
    return false;
  } finally {
    if (running === mine) running = null;
    showControls();
    showCode();
  }
}

async function send(text) {
  if (running || !text.trim()) return;
  lastText = text;
  if (view === "tab-chat") $("prompt").value = ""; // the next one may be typed meanwhile
  const isTaken = await run((signal) => views[view].send(text, signal));
  if (!isTaken) $("prompt").value ||= text;
}

async function sendResults(results, form) {
  if (running) return;
  form.hidden = true;
  form.hidden = await run((signal) => views["tab-chat"].sendResults(results, signal));
}

const stop = () => running?.abort();

// --- the request in code ---

function showCode() {
  const text = $("prompt").value.trim();
  try {
    const request = (!text && views[view].sent) || views[view].request(text || lastText);
    $("code").textContent = language === "tab-curl" ? asCurl(request) : asPython(request);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    $("code").textContent = error.message;
  }
  $("code").setAttribute("aria-labelledby", language);
}

async function copy() {
  const range = document.createRange();
  range.selectNodeContents($("code"));
  getSelection().removeAllRanges();
  getSelection().addRange(range);
  // the clipboard is there on https and on this machine alone; elsewhere the text is selected, ready to be copied
  await navigator.clipboard?.writeText($("code").textContent).catch(() => {});
  $("copy").textContent = navigator.clipboard ? "Copied" : "Selected";
  setTimeout(() => ($("copy").textContent = "Copy"), 1500);
}

// --- the key and the state of the server ---

function openKey(isOpen = true) {
  $("key-form").hidden = !isOpen;
  $("key-open").setAttribute("aria-expanded", isOpen);
  if (isOpen) $("key").focus();
}

async function readModel() {
  const [card] = (await getJson("v1/models")).data;
  served.model = card.id;
  $("model").textContent = card.id.split("/").at(-1);
  $("model").title = card.id;
  $("max-tokens").max = card.max_model_len - 1;
  document.title = `specserve · ${card.id.split("/").at(-1)}`;
  showExamples(EXAMPLES_OF[card.id] ?? EXAMPLES);
  showCode();
}

function showExamples(texts) {
  $("examples").replaceChildren(...texts.map((text) => {
    const button = make("button", { type: "button", class: "quiet" }, text);
    button.addEventListener("click", () => send(text));
    return button;
  }));
}

const setState = (kind, text) => {
  if ($("state").dataset.kind === kind && $("state").lastElementChild.textContent === text) return;
  $("state").dataset.kind = kind;
  $("state").lastElementChild.textContent = text;
};

let mostPrograms = 0;

function showCompiling(left) {
  mostPrograms = Math.max(mostPrograms, left);
  const bar = $("compiling");
  bar.hidden = !left;
  bar.setAttribute("aria-valuemax", mostPrograms);
  bar.setAttribute("aria-valuenow", mostPrograms - left);
  bar.firstElementChild.style.width = `${100 * (1 - left / Math.max(1, mostPrograms))}%`;
  $("live-note").textContent = left ? "it answers meanwhile, only more slowly" : "";
}

async function look() {
  if (needsKey && !getKey()) return setState("locked", "Needs a key");
  try {
    if (!served.model) await readModel();
    const sample = await scrape();
    live.push(sample);
    const left = sample.programsLeft ?? 0;
    showCompiling(left);
    setState(left ? "busy" : "ready", left ? `Compiling, ${number(left)} programs left` : "Ready");
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) {
      setKey(""); // asked once, not at every poll
      openKey();
    }
    served.model = null; // whoever answers next may serve another one
    setState(error.status === 401 ? "locked" : "gone", error.status === 401 ? "Key refused" : "Not reachable");
  }
}

async function poll() {
  try {
    if (!document.hidden) await look();
  } finally {
    setTimeout(poll, POLL_MS);
  }
}

// --- wiring ---

tabs(document.querySelector(".bar .tabs"), (id) => {
  stop();
  view = id;
  $("chat").hidden = id !== "tab-chat";
  $("race").hidden = id !== "tab-race";
  $("answer-card").hidden = id === "tab-race"; // each lane has its own figures
  if (id === "tab-race" && !$("prompt").value) $("prompt").value = lastText;
  say("");
  showControls();
  showCode();
});
tabs(document.querySelector(".code .tabs"), (id) => {
  language = id;
  showCode();
});

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send($("prompt").value.trim());
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
$("composer").addEventListener("input", showCode);
$("stop").addEventListener("click", stop);
$("again").addEventListener("click", () => {
  views["tab-chat"].clear();
  showControls();
  $("prompt").focus();
});
$("copy").addEventListener("click", copy);
$("tools-example").addEventListener("click", () => {
  $("tools").value = JSON.stringify(TOOLS, null, 2);
  showCode();
});
$("key-open").addEventListener("click", () => openKey($("key-form").hidden));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value.trim());
  $("key").value = "";
  openKey(false);
  $("prompt").focus();
  look();
});

if (!served.hasChat) $("prompt").placeholder = "Begin a text, and the model continues it";
$("tools-box").hidden = !served.hasChat;
$("key-open").hidden = !needsKey;
$("metrics-link").hidden = needsKey; // a link cannot send the key
showControls();
showCode();
if (needsKey && !getKey()) openKey();
poll();
