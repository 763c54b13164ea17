// One answer: its steps, its tokens coloured by where they come from, and its figures.

import { Blocks } from "./blocks.js";
import { figures, number, plural } from "./dom.js";

export class Answer {
  // `text` is the element that the tokens go to; `onStep` hears of the steps that are pointed at.
  constructor(text, onStep = () => {}) {
    this.text = text;
    this.blocks = new Blocks(text);
    this.onStep = onStep;
    text.addEventListener("pointerover", (event) => {
      const step = event.target.closest?.("[data-step]");
      if (step) this.onStep(Number(step.dataset.step));
    });
    this.reset();
  }

  reset() {
    this.steps = [];
    this.tokens = [];
    this.depths = [];
    this.finish = null;
    this.start = performance.now();
    this.blocks.reset();
  }

  // Takes the next step, which came after so many milliseconds.
  push(step, time = performance.now() - this.start) {
    this.finish = step.finish ?? this.finish;
    this.blocks.push(step, this.steps.length);
    if (!step.tokens.length) return;
    this.tokens.push(...step.tokens);
    this.depths.push(...step.depths);
    this.steps.push({ ...step, time });
  }

  mark(index) {
    this.text.querySelectorAll(".marked").forEach((group) => group.classList.remove("marked"));
    this.text.querySelectorAll(`[data-step="${index}"]`).forEach((group) => group.classList.add("marked"));
  }

  get content() {
    return this.blocks.content;
  }

  get numForwards() {
    return Math.max(0, this.steps.length - 1); // the first token comes of the prompt's forward
  }

  get tau() {
    return (this.tokens.length - 1) / this.numForwards;
  }

  get numAccepted() {
    return this.depths.filter((depth) => depth > 0).length;
  }

  // Tokens per second after the first step, so that the prompt does not count.
  get rate() {
    if (this.numForwards < 1) return NaN;
    const seconds = (this.steps.at(-1).time - this.steps[0].time) / 1000;
    return (this.tokens.length - this.steps[0].tokens.length) / seconds;
  }

  figures() {
    return figures([
      ["tokens / s", number(this.rate, this.rate < 100 ? 1 : 0), "after the first token, as they came to this page"],
      ["tau", number(this.tau, 2), "tokens per forward of the target"],
      ["tokens", number(this.tokens.length), "of the answer"],
      ["forwards", number(this.numForwards), "of the target, the prompt's left out"],
    ]);
  }

  summary() {
    return `${plural(this.tokens.length, "token")} in ${plural(this.numForwards, "forward")}, `
      + `${this.numAccepted} of them guessed by the draft`;
  }
}
