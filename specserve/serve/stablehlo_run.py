"""Generate with exported programs: `python run.py 5 6 7 --tokens 16`, of token ids, greedily, prints token ids.

It shows how the programs of this folder are called, as manifest.json describes them, and needs jax, numpy and
safetensors alone. The state goes in and comes back: programs that take it may reuse its memory, so it is donated.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
from safetensors.flax import load_file


class Exported:
    """The programs of a folder, with their weights on the device and the state of `batch` sequences."""

    def __init__(self, folder: Path) -> None:
        self.manifest = json.loads((folder / "manifest.json").read_text())
        self.sizes = self.manifest["sizes"]
        tensors = load_file(folder / "weights.safetensors")
        self._weights = [tensors[entry["name"]] for entry in self.manifest["weights"]]
        self._programs = {}
        for name, program in self.manifest["programs"].items():
            call = jax.export.deserialize(bytearray((folder / program["file"]).read_bytes())).call
            first = len(self._weights) if "weights" in program["takes"] else 0
            state = range(first, first + len(self.manifest["state"])) if "state" in program["takes"] else ()
            self._programs[name] = jax.jit(call, donate_argnums=tuple(state))
        self._state = list(self._programs["begin"]())

    def run(self, name: str, *inputs: Any) -> dict[str, Any]:
        """Call a program with its arguments besides weights and state. Returns its results besides the state,
        by name."""
        program = self.manifest["programs"][name]
        known = {"weights": self._weights, "state": self._state}
        arrays = [array for kind in program["takes"] if isinstance(kind, str) for array in known[kind]]
        specs = [spec for spec in program["takes"] if not isinstance(spec, str)]
        cast = [
            np.asarray(value, spec["dtype"]).reshape(spec["shape"]) for value, spec in zip(inputs, specs, strict=True)
        ]
        found = self._programs[name](*arrays, *cast)
        self._state = list(found[: len(self._state)])
        return {
            spec["name"]: array for spec, array in zip(program["gives"][1:], found[len(self._state) :], strict=True)
        }

    def admit(self, slot: int, prompt: list[int]) -> None:
        """Give a slot to a prompt, with pages of its own."""
        pages = self.sizes["max_pages"]
        given = dict(self.manifest["admission"])
        values = {name: np.full(spec["shape"], given[name]) for name, spec in self._admission()}
        values["admission.page_row"] = np.arange(slot * pages, (slot + 1) * pages)
        values["admission.history"][: len(prompt)] = prompt
        values["admission.rows.output_start"][:] = values["admission.rows.stop_start"][:] = len(prompt)
        self.run("admit", slot, *values.values())

    def _admission(self) -> list[tuple[str, dict[str, Any]]]:
        takes = self.manifest["programs"]["admit"]["takes"]
        return [(spec["name"], spec) for spec in takes if not isinstance(spec, str) and spec["name"] != "slot"]

    def generate(self, prompt: list[int], num_tokens: int, *, is_plain: bool = False) -> list[int]:
        """Return the tokens that follow a prompt, in slot 0, up to an end-of-sequence token."""
        num_bytes = -(-self.sizes["vocab_size"] // 8)
        batch, chunk = self.sizes["batch"], self.sizes["chunk"]
        self.admit(0, prompt)
        found: list[int] = []
        for start in range(0, len(prompt), chunk):
            part, is_last = prompt[start : start + chunk], start + chunk >= len(prompt)
            told = self.run("prefill", 0, len(part), is_last, np.full(num_bytes, 255))
            found = [int(told["counts"][0, 2])]
        slots = [0, *[batch] * (batch - 1)]
        name = "plain" if is_plain or "speculative" not in self.manifest["programs"] else "speculative"
        masks = [np.full((batch, num_bytes), 255)] if name == "plain" else []
        ends = set(self.manifest["eos_ids"])
        while len(found) < num_tokens and not ends & set(found):
            counts = np.asarray(self.run(name, slots, *masks)["counts"])[0]
            found += counts[2 : 3 + counts[0]].tolist()
        end = next((i + 1 for i, token_id in enumerate(found) if token_id in ends), len(found))
        return found[: min(end, num_tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="+", type=int, help="token ids")
    parser.add_argument("--tokens", type=int, default=16, help="how many to generate")
    parser.add_argument("--plain", action="store_true", help="plain decoding instead of speculation")
    given = parser.parse_args()
    exported = Exported(Path(__file__).parent)
    sys.stdout.write(f"{exported.generate(given.prompt, given.tokens, is_plain=given.plain)}\n")


if __name__ == "__main__":
    main()
