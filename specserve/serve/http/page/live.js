// What /metrics says of the server, drawn: the last minute of throughput, tau, acceptance by depth, and pages.

import { draw, make, number, plural } from "./dom.js";

const SECONDS = 60, WIDTH = 160, HEIGHT = 36;

// A line over the last minute; `points` are [time, value].
function spark(points, most, label) {
  const now = points.at(-1)?.[0] ?? 0;
  const at = points.map(([time, value]) =>
    [WIDTH * (1 - (now - time) / SECONDS), HEIGHT - 2 - (HEIGHT - 6) * Math.min(1, value / (most || 1))]);
  const line = at.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label, class: "spark" });
  svg.append(draw("path", { class: "base", d: `M0 ${HEIGHT - 1.5}H${WIDTH}` }));
  if (at.length > 1) {
    svg.append(draw("path", { class: "area", d: `${line}L${at.at(-1)[0]} ${HEIGHT - 2}L${at[0][0]} ${HEIGHT - 2}Z` }));
    svg.append(draw("path", { class: "line", d: line, "vector-effect": "non-scaling-stroke" }));
  }
  return svg;
}

const chart = (name, value, note, picture, isWide = false) => make("div", { class: isWide ? "chart wide" : "chart" },
  make("h3", {}, name), make("p", { class: "value" }, make("b", {}, value), " ", make("span", { class: "note" }, note)), picture);

function depthBars(shares) {
  const bars = shares.map((share, i) => make("li", {},
    make("span", { class: "name" }, `${i + 1}`),
    make("span", { class: "track" }, bar(share, Math.min(i + 1, 5))),
    make("span", { class: "share" }, `${number(100 * share)}%`)));
  return make("ol", { class: "bars", "aria-label": "Share of steps that accept a token at each depth" }, ...bars);
}

function bar(share, depth) {
  const fill = make("i", { "data-d": depth });
  fill.style.width = `${100 * share}%`;
  return fill;
}

// A list of names and their tau.
function taus(label, each) {
  const items = each.map(([name, tau]) => make("li", {},
    make("span", { class: "name" }, name), make("b", {}, tau ? number(tau, 2) : "–")));
  return make("ul", { class: "taus", "aria-label": label }, ...items);
}

const adapterTaus = (adapters) => taus("Tokens per forward of each adapter",
  Object.entries(adapters).map(([name, counts]) => [name, 1 + gained(counts) / counts.steps]));

// Over the last answers of each version.
const versionTaus = (versions) => taus("Tokens per forward of each version of the head",
  Object.entries(versions).map(([name, { tau }]) => [`version ${name}`, tau]));

// Tokens beyond one for each step: the accepted ones, less those steps whose own token lay behind an answer's end.
const gained = (sample) => sample.accepted - sample.cut;

export class Live {
  constructor(element) {
    this.element = element;
    this.samples = [];
  }

  push(sample) {
    if (sample.tokens < this.samples.at(-1)?.tokens) this.samples = []; // another server has taken its place
    this.samples.push(sample);
    while (sample.time - this.samples[0].time > SECONDS) this.samples.shift();
    this.render();
  }

  // Counts of the last minute where something ended in it, else those since the server's start.
  recent(read) {
    const [first, last] = [this.samples[0], this.samples.at(-1)];
    const isRecent = last.steps > first.steps;
    return { isRecent, get: (sample) => read(sample ?? last) - (isRecent ? read(first) : 0) };
  }

  // tau of what ended between two samples, or as it was before where nothing did.
  taus() {
    const found = [];
    this.samples.slice(1).forEach((s, i) => {
      const steps = s.steps - this.samples[i].steps;
      const tau = steps ? 1 + (gained(s) - gained(this.samples[i])) / steps : found.at(-1)?.[1];
      if (tau) found.push([s.time, tau]);
    });
    return found;
  }

  render() {
    const last = this.samples.at(-1);
    const steps = this.recent((s) => s.steps), more = this.recent(gained);
    const since = steps.isRecent ? "last minute" : "since start";
    const tau = 1 + more.get() / steps.get();
    const shares = last.perDepth.map((_, d) => this.recent((s) => s.perDepth[d] ?? 0).get() / steps.get());
    const rates = this.samples.slice(1).map((s, i) => [s.time, (s.tokens - this.samples[i].tokens) / (s.time - this.samples[i].time)]);
    const rate = rates.at(-1)?.[1] ?? 0;
    const peak = Math.max(1, ...rates.map(([, value]) => value));
    const usage = this.samples.map((s) => [s.time, s.usage]);
    const running = this.samples.map((s) => [s.time, s.running]);
    const held = Math.round(last.usage * last.pages);
    this.element.replaceChildren(
      chart("Tokens per second", number(rate), `peak ${number(peak)}`, spark(rates, peak, `${number(rate)} tokens per second`)),
      chart("Tokens per forward, tau", last.steps ? number(tau, 2) : "–", last.steps ? since : "after the first answer",
        spark(this.taus(), Math.max(2, ...this.taus().map(([, value]) => value)), `tau ${number(tau, 2)}`)),
      chart("Acceptance by depth", last.steps ? `${number(100 * (shares[0] ?? 0))}%` : "–", last.steps ? `at depth 1, ${since}` : "after the first answer",
        depthBars(last.steps ? shares : []), true),
      chart("Pages held", `${number(held)} / ${number(last.pages)}`, `${number(last.cached)} cached`,
        spark(usage, 1, `${number(100 * last.usage)}% of the pages are held`)),
      chart("Running", number(last.running), `${number(last.waiting)} waiting`,
        spark(running, Math.max(2, ...running.map(([, value]) => value)), plural(last.running, "running sequence"))),
      ...(Object.keys(last.adapters).length
        ? [chart("Adapters", plural(Object.keys(last.adapters).length, "adapter"), "tokens per forward since start", adapterTaus(last.adapters), true)] : []),
      ...(Object.keys(last.versions).length
        ? [chart("Head that learns", `version ${Object.keys(last.versions).find((name) => last.versions[name].isServing)}`,
          last.drift === undefined ? "tau of each" : `tau of each; drift ${number(last.drift, 2)}`, versionTaus(last.versions), true)] : []),
    );
  }
}
