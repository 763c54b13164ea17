// The parts of one answer: reasoning that folds away, text, and calls of tools as cards. Every token stands in its part,
// coloured by where it comes from; those that only mark a part are small.

import { MOST_DEPTH, make, origin, plural } from "./dom.js";

const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

class Block {
  constructor(...around) {
    this.text = ""; // what the server says of this part
    this.rest = ""; // what of that no token has been shown for
    this.tokens = make("div", { class: "tokens" });
    this.element = make(...around);
  }

  grow(text) {
    this.text += text;
    this.rest += text;
  }

  add({ text, depth, step }) {
    let group = this.tokens.lastElementChild;
    if (group?.dataset.step !== String(step)) this.tokens.append((group = make("span", { "data-step": step })));
    const isSaid = this.says(text);
    if (isSaid) this.rest = this.rest.trimStart().slice(text.trim().length);
    const mark = !isSaid && "mark";
    group.append(make("span", { "data-d": Math.min(depth, MOST_DEPTH), title: origin(depth), class: mark }, text));
  }

  // Whether a token is the next of this part's text, and not one that marks a part.
  says(text) {
    return this.rest.trimStart().startsWith(text.trim());
  }

  end() {}
}

class TextBlock extends Block {
  constructor() {
    super("div", { class: "content" });
    this.element.append(this.tokens);
  }
}

class Reasoning extends Block {
  constructor() {
    super("details", { class: "thought", open: true });
    this.note = make("span", { class: "note" });
    this.element.append(make("summary", {}, "Reasoning · ", this.note), this.tokens);
  }

  add(token) {
    super.add(token);
    this.num = (this.num ?? 0) + 1;
    this.note.textContent = plural(this.num, "token");
  }

  end() {
    this.element.open = false; // the answer is what follows
  }
}

class Call extends Block {
  constructor({ id, function: { name } }) {
    super("section", { class: "call", "aria-label": `Call of ${name}` });
    this.id = id;
    this.name = name;
    this.arguments = make("dl", { class: "arguments" });
    const written = make("details", {}, make("summary", {}, "As the model writes it"), this.tokens);
    this.element.append(make("h4", {}, "Calls ", make("code", { translate: "no" }, name)), this.arguments, written);
  }

  grow(text) {
    super.grow(text);
    let values = [["…", this.text]];
    try {
      values = Object.entries(JSON.parse(this.text));
      this.isWhole = true;
    } catch {} // more is coming
    this.arguments.replaceChildren(...values.flatMap(([name, value]) =>
      [make("dt", {}, name), make("dd", { translate: "no" }, shown(value))]));
  }

  asMessage() {
    return { id: this.id, type: "function", function: { name: this.name, arguments: this.text } };
  }
}

export class Blocks {
  constructor(element) {
    this.element = element;
    this.reset();
  }

  reset() {
    this.all = [];
    this.waiting = []; // tokens whose part is not known yet
    this.element.replaceChildren();
  }

  open(block) {
    this.all.at(-1)?.end();
    this.all.push(block);
    this.element.append(block.element);
    return block;
  }

  // Takes the parts of a step, and its tokens. A token goes to the first part that still lacks its text.
  push(step, index) {
    step.tokens.forEach((text, i) => this.waiting.push({ text, depth: step.depths[i], step: index }));
    const grown = [];
    const grow = (kind, text, begin, isSame = () => true) => {
      const last = this.all.at(-1);
      const block = last instanceof kind && isSame(last) ? last : this.open(begin());
      block.grow(text);
      grown.push(block);
    };
    if (step.reasoning) grow(Reasoning, step.reasoning, () => new Reasoning());
    if (step.text) grow(TextBlock, step.text, () => new TextBlock());
    for (const call of step.calls) grow(Call, call.function.arguments ?? "", () => new Call(call), () => !call.id);
    if (!grown.length && step.finish) grown.push(this.all.at(-1) ?? this.open(new TextBlock()));
    while (grown.length && this.waiting.length) {
      while (grown.length > 1 && !grown[0].rest.trim()) grown.shift();
      const [block] = grown, token = this.waiting.shift(), before = this.all[this.all.indexOf(block) - 1];
      const isEnd = before instanceof Reasoning && !block.tokens.firstChild && !(token.text.trim() && block.says(token.text));
      (isEnd && block instanceof TextBlock ? before : block).add(token);
    }
  }

  of(kind) {
    return this.all.filter((block) => block instanceof kind);
  }

  get content() {
    return this.of(TextBlock).map((block) => block.text).join("");
  }

  // The calls that were not cut short.
  get calls() {
    return this.of(Call).filter((call) => call.isWhole);
  }

  get said() {
    return [this.content, ...this.calls.map((call) => `Calls ${call.name} with ${call.text}`)].join(" ");
  }

  // The answer as a message of the history.
  asMessage() {
    const message = { role: "assistant", content: this.content };
    const thought = this.of(Reasoning).map((block) => block.text).join("");
    if (thought) message.reasoning_content = thought;
    if (this.calls.length) message.tool_calls = this.calls.map((call) => call.asMessage());
    return message;
  }
}
