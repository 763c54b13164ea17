// Making elements, and saying things to those who cannot see them.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

const filled = (element, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
};

export const make = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
export const draw = (tag, attributes = {}, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

export const MOST_DEPTH = 5; // deeper tokens share its colour

export const origin = (depth) => (depth ? `accepted at depth ${depth}` : "drawn by the target itself");

export const announce = (text) => ($("announce").textContent = text);

export const plural = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

export const number = (value, digits = 0) =>
  Number.isFinite(value) ? value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) : "–";

// Figures with their names, in a <dl>.
export const figures = (pairs) => pairs.map(([name, value, title]) =>
  make("div", { title }, make("dt", {}, name), make("dd", {}, value)));

// Buttons of a tab list: a click or an arrow key selects; `onSelect` gets the button's id.
export function tabs(list, onSelect) {
  const buttons = [...list.querySelectorAll('[role="tab"]')];
  const select = (chosen) => {
    for (const button of buttons) {
      button.setAttribute("aria-selected", button === chosen);
      button.tabIndex = button === chosen ? 0 : -1;
    }
    onSelect(chosen.id);
  };
  buttons.forEach((button, i) => {
    button.addEventListener("click", () => select(button));
    button.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = buttons[(i + step + buttons.length) % buttons.length];
      next.focus();
      select(next);
    });
  });
}
