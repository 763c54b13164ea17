// The same prompt and seed without speculation and with it, one after the other, and whether the texts are equal.

import { Answer } from "./answer.js";
import { stream } from "./api.js";
import { $, announce, make, number, plural } from "./dom.js";
import { requestFor, settings } from "./request.js";

class Lane {
  constructor(element, title, panel) {
    this.text = make("div", { class: "said" });
    this.figures = make("dl", { class: "figures" });
    this.bar = make("i");
    this.track = make("div", { class: "track", "aria-hidden": "true" }, this.bar);
    this.status = make("span", { class: "note" });
    element.replaceChildren(make("h3", {}, title, " ", this.status), this.figures, this.track, this.text);
    this.answer = new Answer(this.text, (step) => {
      if (panel.answer !== this.answer) panel.follow(this.answer);
      panel.show(step, true);
    });
    this.panel = panel;
    this.show(1);
  }

  show(numTokens) {
    this.figures.replaceChildren(...this.answer.figures());
    this.bar.style.width = `${Math.min(100, (100 * this.answer.tokens.length) / numTokens)}%`;
  }

  async run(request, signal) {
    this.status.textContent = "running";
    this.panel.follow(this.answer);
    this.answer.reset();
    for await (const step of stream(request, signal)) {
      this.answer.push(step);
      this.show(request.body.max_tokens);
      this.panel.show(this.answer.steps.length - 1);
    }
    this.status.textContent = `${number((performance.now() - this.answer.start) / 1000, 2)} s`;
    this.show(this.answer.tokens.length);
  }

  // Pushes the recorded steps again that had come by `now` milliseconds; whether there are more.
  replay(steps, now) {
    while (this.answer.steps.length < steps.length && steps[this.answer.steps.length].time <= now) {
      const step = steps[this.answer.steps.length];
      this.answer.push(step, step.time);
    }
    this.show(steps.reduce((sum, step) => sum + step.tokens.length, 0));
    return this.answer.steps.length < steps.length;
  }
}

export class Race {
  // `live` tells what else the server did while the race ran.
  constructor(panel, live) {
    this.panel = panel;
    this.live = live;
    this.clear();
  }

  clear() {
    this.off = new Lane($("lane-off"), "Speculation off", this.panel);
    this.on = new Lane($("lane-on"), "Speculation on", this.panel);
    $("verdict").hidden = true;
  }

  // Both requests; salts of their own, so that neither finds the other's prompt in the prefix cache.
  requests(text, salt = "race") {
    const chosen = settings();
    const on = chosen.speculation === "off" ? "auto" : chosen.speculation;
    return [["off", "a"], [on, "b"]].map(([speculation, lane]) =>
      requestFor([{ role: "user", content: text }], { ...chosen, speculation, cache_salt: `${salt}-${lane}` }));
  }

  request(text) {
    return this.requests(text)[1];
  }

  async send(text, signal) {
    this.clear();
    const [off, on] = this.requests(text, `race-${Date.now()}-${Math.random().toString(36).slice(2)}`);
    this.sent = on;
    this.start = performance.now() / 1000;
    try {
      await this.off.run(off, signal);
      await this.on.run(on, signal);
    } catch (error) {
      for (const lane of [this.off, this.on]) if (!lane.answer.finish) lane.status.textContent = "stopped";
      if (error.name !== "AbortError") throw error;
      return;
    }
    this.judge();
  }

  judge() {
    const [off, on] = [this.off.answer, this.on.answer];
    const isEqual = off.content === on.content && off.tokens.join("\0") === on.tokens.join("\0");
    const gain = on.rate / off.rate;
    const replay = make("button", { type: "button", class: "quiet" }, "Replay side by side");
    replay.addEventListener("click", () => this.replay(replay));
    const equal = isEqual
      ? `Both texts are equal: ${plural(off.tokens.length, "token")}, ${plural(off.content.length, "character")}.`
      : `The texts differ from character ${firstDifference(off.content, on.content) + 1} on. Where two tokens are nearly `
        + "tied, rounding in another shape of step may choose the other one.";
    const speed = this.disturbance()
      ?? `${number(gain, 2)}× the tokens per second, in ${number(on.numForwards)} forwards of the target instead of ${number(off.numForwards)}.`;
    const verdict = $("verdict");
    verdict.hidden = false;
    verdict.dataset.equal = isEqual;
    verdict.replaceChildren(make("p", {}, make("b", {}, isEqual ? "Equal" : "Different"), " ", equal), make("p", {}, speed), replay);
    verdict.scrollIntoView({ block: "nearest" });
    announce(`${equal} ${speed}`);
  }

  // Why the times say nothing, where they do.
  disturbance() {
    const last = this.live.samples.at(-1);
    const during = [...this.live.samples.filter((sample) => sample.time >= this.start), ...(last ? [last] : [])];
    if (during.some((sample) => sample.programsLeft > 0)) {
      return "The server was still compiling its programs, so the times compare nothing. Race again when it is ready.";
    }
    if (during.some((sample) => sample.running + sample.waiting > 1)) {
      return "Other requests ran meanwhile, so the times compare nothing. Race again when the server is idle.";
    }
    const hasProposed = this.on.answer.steps.some((step) => step.tree);
    return hasProposed ? null : "Nothing was proposed: the server decoded plainly both times, and the times differ by chance.";
  }

  replay(button) {
    const lanes = [this.off, this.on].map((lane) => ({ lane, steps: lane.answer.steps, finish: lane.answer.finish }));
    for (const { lane } of lanes) lane.answer.reset();
    const start = performance.now();
    button.disabled = true;
    const tick = () => {
      const now = performance.now() - start;
      const isOpen = lanes.map(({ lane, steps }) => lane.replay(steps, now)).some(Boolean);
      if (isOpen) return requestAnimationFrame(tick);
      button.disabled = false;
    };
    tick();
  }
}

const firstDifference = (a, b) => {
  let at = 0;
  while (at < a.length && a[at] === b[at]) at++;
  return at;
};
