// The conversation: each answer streams with its tokens coloured, and is sent back as the history of the next one.

import { Answer } from "./answer.js";
import { stream } from "./api.js";
import { $, announce, make } from "./dom.js";
import { requestFor, settings } from "./request.js";

export class Chat {
  constructor(panel) {
    this.panel = panel;
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
    const request = (this.sent = this.request(text));
    $("welcome").hidden = true;
    const said = make("div", { class: "said" });
    const note = make("p", { class: "note" });
    const asked = make("li", { class: "user" }, make("span", { class: "visually-hidden" }, "You: "), make("div", { class: "said" }, text));
    const item = make("li", { class: "assistant", "aria-busy": "true" }, make("span", { class: "visually-hidden" }, "Answer: "), said, note);
    $("messages").append(asked, item);
    item.scrollIntoView({ block: "nearest" });
    const answer = new Answer(said, (step) => this.point(answer, step));
    this.panel.follow(answer);
    try {
      for await (const step of stream(request, signal)) this.take(answer, step, item);
    } catch (error) {
      if (error.name !== "AbortError") {
        if (!answer.content) [asked, item].forEach((element) => element.remove());
        throw error;
      }
    } finally {
      item.removeAttribute("aria-busy");
    }
    note.textContent = answer.summary() + (answer.finish === "length" ? "; cut at max tokens" : "");
    announce(`Answer: ${note.textContent}. ${answer.content}`);
    this.messages.push({ role: "user", content: text }, { role: "assistant", content: answer.content });
  }

  take(answer, step, item) {
    const isAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 80;
    answer.push(step);
    $("answer").replaceChildren(...answer.figures());
    this.panel.show(answer.steps.length - 1);
    if (isAtEnd) item.scrollIntoView({ block: "end" });
  }

  point(answer, step) {
    if (this.panel.answer !== answer) this.panel.follow(answer);
    this.panel.show(step, true);
    $("answer").replaceChildren(...answer.figures());
  }
}
