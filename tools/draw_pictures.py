"""Draw the two pictures of docs/design.md, the walk of a request and the walk of a batch. Run it from the checkout:
`python tools/draw_pictures.py`.

The mask under the tree is computed from the tree's parents, by the function that serves.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from specserve.speculative.tree import ancestor_mask

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
INK, PALE, DRAFT, TARGET, ACCEPTED = "#1f2430", "#8a93a6", "#d97706", "#2563eb", "#15803d"
LINE = 16  # height of a line of text


class Picture:
    """SVG with a white ground, so that it can be read in a dark page too."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="system-ui, sans-serif" font-size="13" role="img"><title>{escape(title)}</title>',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 8 4 0 8z" fill="{PALE}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        ]

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        colour: str = INK,
        anchor: str = "start",
        size: int = 13,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        how = f'fill="{colour}" text-anchor="{anchor}" font-size="{size}"{weight}'
        self.parts.append(f'<text x="{x}" y="{y}" {how}>{escape(text)}</text>')

    def lines(self, x: float, y: float, lines: Sequence[str], colour: str = PALE) -> None:
        for i, line in enumerate(lines):
            self.text(x, y + i * LINE, line, colour=colour, size=12)

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, text: str = "", fill: str = "#fff"
    ) -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="{colour}"/>'
        )
        self.text(x + width / 2, y + height / 2 + 5, text, anchor="middle")

    def arrow(self, *points: tuple[float, float], colour: str = PALE) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" marker-end="url(#tip)"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1.5) -> None:
        self.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="{width}"/>')

    def cell(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="#e3e6ec"/>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def chain_of_boxes(picture: Picture, y: float, boxes: Sequence[tuple[str, str]], x: float, width: float) -> None:
    """Boxes side by side, an arrow from each to the next."""
    for i, (text, colour) in enumerate(boxes):
        left = x + i * (width + 26)
        picture.box(left, y, width, 34, colour, text)
        if i:
            picture.arrow((left - 26, y + 17), (left - 2, y + 17))


# A tree of eight proposed tokens; node 0 is the root.
TOKENS = ("return", "self", "x", "None", ".", "[", "+", "name", "value")
PARENTS = (0, 0, 0, 0, 1, 1, 2, 4, 4)
PLACES = ((0, 1), (1, 0), (1, 1.6), (1, 2.6), (2, -0.4), (2, 0.5), (2, 1.6), (3, -0.8), (3, 0.1))  # depth, row
PATH = (0, 1, 4, 8)  # accepted


def draw_request() -> Picture:
    picture = Picture(880, 600, "The walk of a request through specserve")
    picture.text(24, 34, "The walk of a request", size=17, bold=True)
    chain_of_boxes(
        picture, 56, [("HTTP request", PALE), ("tokenizer", PALE), ("scheduler", PALE), ("controller", PALE)], 24, 120
    )
    picture.text(630, 70, "the host: requests, slots,", colour=PALE, size=12)
    picture.text(630, 86, "pages, which tree", colour=PALE, size=12)
    picture.parts.append(f'<rect x="24" y="118" width="832" height="66" rx="8" fill="#f6f7f9" stroke="{PALE}"/>')
    picture.text(72, 138, "one compiled step", colour=PALE, size=12)
    steps = (("propose", DRAFT), ("forward", TARGET), ("draw", TARGET), ("verify", ACCEPTED), ("commit", ACCEPTED))
    chain_of_boxes(picture, 142, steps, 150, 110)
    picture.arrow((522, 90), (522, 104), (60, 104), (60, 160), (146, 160))
    picture.arrow((804, 176), (836, 176), (836, 200))
    picture.text(856, 216, "counts and tokens → text → stream", colour=PALE, anchor="end", size=12)

    _draw_tree(picture)
    _draw_mask(picture)
    return picture


def _draw_tree(picture: Picture) -> None:
    """What the drafter proposes, with the accepted path and the bonus token."""
    picture.text(24, 240, "propose: the drafter grows a tree below the root", bold=True)

    def place(node: int) -> tuple[float, float]:
        depth, row = PLACES[node]
        return 40 + depth * 92, 306 + row * 54

    for node in range(1, len(TOKENS)):
        (x1, y1), (x2, y2) = place(PARENTS[node]), place(node)
        is_taken = node in PATH
        picture.line(x1 + 62, y1 + 14, x2, y2 + 14, ACCEPTED if is_taken else "#cfd4de", 2.5 if is_taken else 1.5)
    for node, token in enumerate(TOKENS):
        x, y = place(node)
        colour = ACCEPTED if node in PATH else DRAFT
        picture.box(x, y, 62, 28, colour, token, "#ecfdf3" if node in PATH else "#fff7ed")
        picture.text(x + 1, y - 4, str(node), colour=PALE, size=10)
    x, y = place(8)
    picture.line(x + 62, y + 14, x + 84, y + 14, TARGET, 2.5)
    picture.box(x + 84, y, 56, 28, TARGET, "(", "#eff6ff")
    picture.lines(
        24,
        510,
        (
            "Green: the target's own draw was among the children: accepted.",
            "Blue: the first draw that no child carries, the bonus token, the next root.",
            "The emitted tokens are the target's draws, whatever was proposed.",
        ),
    )


def _draw_mask(picture: Picture) -> None:
    """Which node of the tree sees which, and that all see the prefix."""
    left, top, size = 560, 292, 22
    picture.text(left - 70, 240, "forward: one pass over all nodes", bold=True)
    picture.text(left - 70, 262, "who sees whom: every node sees the committed", colour=PALE, size=12)
    picture.text(left - 70, 278, "pages, its ancestors and itself", colour=PALE, size=12)
    depth = max(place[0] for place in PLACES)
    mask = np.asarray(ancestor_mask(jnp.asarray([PARENTS]), depth))[0]
    for row, token in enumerate(TOKENS):
        y = top + row * size
        picture.text(left - 76, y + 15, f"{row} {token}", size=11, colour=INK)
        picture.cell(left - 6, y, 60, size, "#dbeafe")
        for column in range(len(TOKENS)):
            picture.cell(left + 62 + column * size, y, size, size, "#2563eb" if mask[row, column] else "#ffffff")
    picture.text(left + 24, top + 9 * size + 18, "prefix pages", anchor="middle", size=11, colour=PALE)
    picture.text(left + 62 + 4.5 * size, top + 9 * size + 18, "n x n tree", anchor="middle", size=11, colour=PALE)
    picture.lines(
        left - 70,
        top + 9 * size + 46,
        (
            "The prefix needs no mask. Keys and values of the",
            "accepted path are written afterwards; the others",
            "never touch a page.",
        ),
    )


def draw_batch() -> Picture:
    picture = Picture(880, 520, "The walk of a training batch through specserve")
    picture.text(24, 34, "The walk of a batch", size=17, bold=True)
    chain_of_boxes(
        picture, 56, [("conversations", PALE), ("loss masks", PALE), ("packed rows", PALE), ("batches", PALE)], 24, 120
    )
    picture.text(630, 70, "the host: shuffled, resumable,", colour=PALE, size=12)
    picture.text(630, 86, "the target's template and tokenizer", colour=PALE, size=12)

    _draw_row(picture)
    picture.box(24, 216, 250, 96, TARGET, "", "#eff6ff")
    picture.text(36, 238, "frozen target, one forward", bold=True)
    picture.lines(
        36, 258, ("taps: outputs of three layers", "last hidden states: what the target", "says about every position")
    )
    _draw_rollout(picture)
    picture.arrow((274, 264), (326, 264))
    picture.box(24, 388, 480, 56, ACCEPTED, "", "#ecfdf3")
    picture.text(36, 410, "loss, a chunk of positions at a time", bold=True)
    picture.text(
        36, 430, "the target's distribution against every step that foresees the position", colour=PALE, size=12
    )
    picture.arrow((149, 312), (149, 384))
    picture.arrow((420, 366), (420, 384))
    picture.box(560, 388, 130, 56, PALE, "optimiser")
    picture.arrow((504, 416), (556, 416))
    picture.arrow((625, 388), (625, 370))
    picture.text(
        24, 478, "Now and then the head answers held-out prompts through the step that serves:", colour=INK, size=13
    )
    picture.text(24, 497, "the tau in the training log is the tau in production.", colour=INK, size=13)
    return picture


def _draw_row(picture: Picture) -> None:
    """A packed row: documents side by side, and which of their tokens bear loss."""
    picture.text(24, 134, "a packed row", bold=True)
    left, width, top = 24, 26, 146
    documents = ((11, 5), (7, 3), (9, 5), (4, 0))  # tokens, and how many of them are the prompt's; the last is padding
    x = left
    for number, (length, prompt) in enumerate(documents):
        for i in range(length):
            is_padding = number == len(documents) - 1
            fill = "#f1f3f6" if is_padding else "#e5e9f0" if i < prompt else "#bfdbfe"
            picture.cell(x, top, width, 22, fill)
            x += width
        picture.line(x, top - 4, x, top + 26, INK)
    picture.text(
        left,
        top + 42,
        "grey: prompts; blue: the assistant's tokens, which bear loss; pale: padding. Nobody sees another document.",
        colour=PALE,
        size=12,
    )


def _draw_rollout(picture: Picture) -> None:
    """The steps of a rollout, each over the states of the one before."""
    picture.box(330, 216, 526, 150, DRAFT, "", "#fff7ed")
    picture.text(342, 238, "the drafter learns to run ahead (rollout)", bold=True)
    for step in range(4):
        y = 252 + step * 26
        picture.text(342, y + 15, f"step {step}", size=12, colour=PALE)
        for place in range(12):
            is_own = place >= step
            picture.cell(400 + place * 24, y, 24, 20, "#fdba74" if is_own else "#ffffff")
        if step:
            picture.arrow((412, y - 8), (430, y + 2), colour=DRAFT)
    picture.lines(
        700,
        266,
        (
            "each step consumes",
            "its own states of the",
            "step before, and sees",
            "the keys that it will",
            "see when it is served",
        ),
    )


PICTURES = {"request.svg": draw_request, "batch.svg": draw_batch}  # by their file's name

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw().svg(), encoding="utf-8")
