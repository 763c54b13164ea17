// The conversation: each answer streams with its tokens coloured, and is sent back as the history of the next one.

import { Answer } from "./answer.js";
import { stream } from "./api.js";
import { $, announce, make } from "./dom.js";
import { requestFor, settings } from "./request.js";

const isAtEnd = () => innerHeight + scrollY >= document.documentElement.scrollHeight - 80;

export class Chat {
  // `onResults` hears of the results of tools, and of the form that they were typed into.
  constructor(panel, onResults) {
    this.panel = panel;
    this.onResults = onResults;
    this.messages = [];
    this.sent = null;
  }

  request(text) {
    return requestFor([...this.messages, { role: "user", content: text }], settings());
  }

  clear() {
    this.messages = [];
    this.sent = null;
    $("messages").replaceChildren();
    $("answer").replaceChildren();
    $("welcome").hidden = false;
    this.panel.follow(null);
  }

  // Sends the text; throws what the server answers. Of a stopped answer, what has come stays.
  async send(text, signal) {
    await this.ask([{ role: "user", content: text }], "user", text, signal);
  }

  // What the tools that the last answer calls have said.
  async sendResults(results, signal) {
    const messages = results.map(([call, content]) => ({ role: "tool", tool_call_id: call.id, content }));
    await this.ask(messages, "user tool", results.map(([call, content]) => `${call.name}: ${content}`).join("\n"), signal);
  }

  async ask(messages, kind, text, signal) {
    const request = (this.sent = requestFor([...this.messages, ...messages], settings()));
    $("welcome").hidden = true;
    const said = make("div", { class: "said" });
    const note = make("p", { class: "note" });
    const asked = make("li", { class: kind }, make("span", { class: "visually-hidden" }, "You: "), make("div", { class: "said" }, text));
    const item = make("li", { class: "assistant", "aria-busy": "true" }, make("span", { class: "visually-hidden" }, "Answer: "), said, note);
    $("messages").append(asked, item);
    item.scrollIntoView({ block: "nearest" });
    const answer = new Answer(said, (step) => this.point(answer, step));
    this.panel.follow(answer);
    try {
      for await (const step of stream(request, signal)) this.take(answer, step, item);
    } catch (error) {
      if (error.name !== "AbortError") {
        if (!answer.tokens.length) [asked, item].forEach((element) => element.remove());
        throw error;
      }
    } finally {
      item.removeAttribute("aria-busy");
    }
    const wasAtEnd = isAtEnd();
    note.textContent = answer.summary() + (answer.finish === "length" ? "; cut at max tokens" : "");
    announce(`Answer: ${note.textContent}. ${answer.blocks.said}`);
    this.messages.push(...messages, answer.blocks.asMessage());
    if (answer.blocks.calls.length) item.append(this.resultsForm(answer.blocks.calls));
    if (wasAtEnd) item.scrollIntoView({ block: "end" });
  }

  // Where the results of an answer's calls are typed in; the model goes on with them.
  resultsForm(calls) {
    const fields = calls.map((call) => [call, make("input", { type: "text", "aria-label": `Result of ${call.name}`, placeholder: `What ${call.name} returns` })]);
    const form = make("form", { class: "results" }, ...fields.map(([, field]) => field), make("button", { type: "submit" }, "Send result"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.onResults(fields.map(([call, field]) => [call, field.value]), form);
    });
    return form;
  }

  take(answer, step, item) {
    const wasAtEnd = isAtEnd();
    answer.push(step);
    $("answer").replaceChildren(...answer.figures());
    this.panel.show(answer.steps.length - 1);
    if (wasAtEnd) item.scrollIntoView({ block: "end" });
  }

  point(answer, step) {
    if (this.panel.answer !== answer) this.panel.follow(answer);
    this.panel.show(step, true);
    $("answer").replaceChildren(...answer.figures());
  }
}
