// Draws the tree that a step proposed: a column for each depth, the accepted path in the top row.

import { $, MOST_DEPTH, draw, make, plural } from "./dom.js";

const SMALLEST = 0.75, MOST_HELD = 166;
const ROW = 26, HEIGHT = 20, GAP = 20, CHAR = 7.3, PAD = 7, EDGE = 2;

const visible = (token) => {
  const shown = token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·") || "∅";
  return shown.length > 13 ? `${shown.slice(0, 12)}…` : shown;
};

// Nodes of a step, {text, depth, kind, parent}: root, accepted, rejected, and the target's own draw at the end.
function nodesOf(step) {
  const { tree, tokens } = step;
  const path = new Set(tree.accepted);
  const nodes = [];
  tree.tokens.forEach((text, i) => {
    const depth = i ? nodes[tree.parents[i]].depth + 1 : 0;
    nodes.push({ text, depth, parent: i ? tree.parents[i] : -1, kind: i ? (path.has(i) ? "accepted" : "rejected") : "root" });
  });
  if (tokens.length > tree.accepted.length) {
    const parent = tree.accepted.at(-1) ?? 0;
    nodes.push({ text: tokens.at(-1), depth: nodes[parent].depth + 1, parent, kind: "own" });
  }
  return nodes;
}

function place(nodes) {
  const children = nodes.map(() => []);
  nodes.forEach((node, i) => node.parent >= 0 && children[node.parent].push(i));
  const rank = { accepted: 0, own: 0, rejected: 1 };
  const widths = [];
  for (const node of nodes) {
    node.label = visible(node.text);
    node.width = node.label.length * CHAR + 2 * PAD;
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  const columns = [EDGE];
  widths.forEach((width, depth) => (columns[depth + 1] = columns[depth] + width + GAP));
  let row = 0;
  const visit = (i) => {
    nodes[i].x = columns[nodes[i].depth];
    nodes[i].y = EDGE + row * ROW;
    children[i].sort((a, b) => rank[nodes[a].kind] - rank[nodes[b].kind]);
    children[i].forEach((child, place) => {
      row += place > 0;
      visit(child);
    });
  };
  visit(0);
  return { width: columns.at(-1) - GAP + EDGE, height: row * ROW + HEIGHT + 2 * EDGE };
}

function edge(from, to) {
  const [x1, y1, x2, y2] = [from.x + from.width, from.y + HEIGHT / 2, to.x, to.y + HEIGHT / 2];
  const bend = x2 - GAP / 2;
  return draw("path", { class: `edge ${to.kind}`, d: `M${x1} ${y1}H${bend - 6}C${bend + 2} ${y1} ${bend - 4} ${y2} ${x2} ${y2}` });
}

const box = (node) => draw("g", { class: `node ${node.kind}`, "data-d": node.kind === "accepted" && Math.min(node.depth, MOST_DEPTH) },
  draw("title", {}, `${JSON.stringify(node.text)}: ${MEANING[node.kind]}`),
  draw("rect", { x: node.x, y: node.y, width: node.width, height: HEIGHT, rx: 5 }),
  draw("text", { x: node.x + PAD, y: node.y + HEIGHT / 2 + 4.2 }, node.label));

const MEANING = {
  root: "the last token before this step",
  accepted: "proposed and accepted",
  rejected: "proposed, and not what the target drew",
  own: "the target's own draw",
};

function describe(step) {
  const { tree, tokens } = step;
  const num = tree.tokens.length - 1;
  const said = tree.accepted.map((node) => JSON.stringify(tree.tokens[node])).join(", ");
  const proposed = num > tree.accepted.length ? `${plural(num, "token")} proposed, ` : ""; // else refused ones may be hidden
  return `${proposed}${tree.accepted.length} accepted${said && `: ${said}`}; `
    + (tokens.length > tree.accepted.length ? `the target's own: ${JSON.stringify(tokens.at(-1))}` : "the answer ends there");
}

// Shows the steps of one answer at a time, one step at a time.
export class TreePanel {
  constructor() {
    this.answer = null;
    $("steps").addEventListener("input", () => this.show(Number($("steps").value) - 1, true));
    this.clear();
  }

  clear() {
    $("tree").style.minHeight = "";
    $("tree").replaceChildren(make("p", { class: "empty" }, "The next answer’s steps will stand here."));
    $("tree-step").textContent = "";
    $("steps").disabled = true;
  }

  // The panel only grows during an answer, so that nothing below it jumps; a rare large tree may pass.
  hold() {
    this.height = Math.min(MOST_HELD, Math.max(this.height, $("tree").offsetHeight));
    $("tree").style.minHeight = `${this.height}px`;
  }

  // Follows an answer, whose newest step is shown until another one is chosen.
  follow(answer) {
    this.answer?.mark(-1);
    this.answer = answer;
    this.height = 0;
    this.clear();
  }

  show(index, isChosen = false) {
    const { answer } = this;
    const step = answer?.steps[index];
    if (!step) return;
    const slider = $("steps");
    slider.disabled = answer.steps.length < 2;
    slider.max = answer.steps.length;
    slider.value = index + 1;
    $("tree-step").textContent = `step ${index + 1} of ${answer.steps.length}`;
    if (isChosen) answer.mark(index);
    if (!step.tree) {
      const why = index ? "A plain step: nothing was proposed." : "The prompt’s forward: it draws the first token.";
      slider.setAttribute("aria-valuetext", `${index + 1}: ${why}`);
      $("tree").replaceChildren(make("p", { class: "empty" }, why));
      return;
    }
    const nodes = nodesOf(step);
    const { width, height } = place(nodes);
    const label = describe(step);
    slider.setAttribute("aria-valuetext", `${index + 1}: ${label}`);
    const below = nodes.filter((node) => node.parent >= 0);
    below.sort((a, b) => (b.kind === "rejected") - (a.kind === "rejected")); // the accepted path lies on top
    const edges = below.map((node) => edge(nodes[node.parent], node));
    const svg = { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label };
    const picture = draw("svg", svg, ...edges, ...nodes.map(box));
    picture.style.minWidth = `${SMALLEST * width}px`; // it shrinks to the panel's width, and beyond that it scrolls
    $("tree").replaceChildren(picture);
    this.hold();
  }
}
