"""The served step as StableHLO: programs, weights and a manifest, which run with JAX alone.

Every program is a function of arrays in a fixed order, of which the manifest tells names, shapes and dtypes. They are
made of XLA's own operations: the native kernels of CPUs and Pallas' of accelerators are left out, since only our
library knows them. So one file runs on every platform that it was lowered for. `stablehlo_run.py` is written beside
them: it calls them, and imports nothing of this package.
"""

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from specserve import provenance
from specserve.checkpoints.tensors import write_json, write_tensors
from specserve.drafters.speculation import describe, drafter_for
from specserve.errors import ConfigError
from specserve.interop.convert import write_folder
from specserve.kernels import native
from specserve.serve.engine.options import blank_token_rows, sampler_rows
from specserve.serve.launch import Models
from specserve.serve.programs.calls import Call, Calls, shape_of
from specserve.serve.programs.layouts import loaded_weights
from specserve.serve.programs.placement import Placement
from specserve.serve.requests.request import SamplingParams
from specserve.speculative import step
from specserve.speculative.step import Admission, StepConfig, StepResult
from specserve.speculative.tree import Tree

FORMAT = 1
MANIFEST, WEIGHTS, RUNNER = "manifest.json", "weights.safetensors", "run.py"
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
WHAT = {  # of the arguments that are neither weights nor state
    "slot": "which slot to give to a new sequence",
    "admission": "what the slot starts with; `admission` has what to give for a greedy request",
    "slots": "the slots that the step is for; the number of slots stands for none",
    "num_tokens": "how many of the next tokens of the history to run, at most the chunk",
    "is_last": "whether they end the prompt: then the drawn token counts",
    "allowed": "bit i of byte j says whether token 8 j + i may be drawn; 255 everywhere: all may",
}


@dataclass(frozen=True)
class ExportSizes:
    """The shapes that programs are exported for."""

    batch: int = 1  # slots, and sequences of a step
    max_len: int = 512  # tokens of a sequence
    page_size: int = 32  # tokens of a page
    chunk: int = 64  # prompt tokens of a prefill
    width: int = 0  # pages of each sequence that attention reads; 0: all

    @property
    def max_pages(self) -> int:
        return -(-self.max_len // self.page_size)

    def check(self, context: int) -> "ExportSizes":
        """Return the sizes with the width that runs. Raises ConfigError for sizes that make no server."""
        if min(self.batch, self.page_size, self.chunk) < 1 or not 2 <= self.max_len <= context:
            raise ConfigError(
                f"a batch of {self.batch}, pages of {self.page_size} tokens, chunks of {self.chunk} and "
                f"--max-model-len {self.max_len}: expected 1 or more of each, and of the last 2 to {context}, the "
                "target's context"
            )
        if not 0 <= self.width <= self.max_pages:
            raise ConfigError(
                f"--width {self.width}: a sequence has {self.max_pages} pages; give 1 to that, or 0 for all"
            )
        return dataclasses.replace(self, width=self.width or self.max_pages)


def export_step(
    models: Models, tree: Tree | None, sizes: ExportSizes, platforms: Sequence[str], folder: Path
) -> list[str]:
    """Write the programs of one way to speculate (None: of plain decoding alone) into an empty folder, and return their
    names. Raises ConfigError."""
    unknown = sorted(set(platforms) - set(PLATFORMS))
    if unknown or not platforms:
        raise ConfigError(f"--platforms {','.join(platforms)}: expected some of {', '.join(PLATFORMS)}")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; give another folder, or empty it")
    if tree is not None and tree.uses_head and models.head is None:
        raise ConfigError(f"there is no head for {models.name}; give one, or --speculation off")
    target, head = models.target, models.head if tree is not None and tree.uses_head else None
    sizes = sizes.check(target.config.max_len)
    config = StepConfig(
        target.config.for_length(sizes.max_len),
        drafter_for([tree], head.drafter if head else None),
        tree.depth if tree else 0,
    )
    weights = loaded_weights(target, head)
    with native.left_out():
        found = _calls(config, weights, tree, sizes)
        files = {name: _export(call, platforms) for name, call in found.items()}
    named = _named(weights)
    manifest = _manifest(models, config, tree, sizes, platforms, found, weights)

    def write(into: Path) -> None:
        for name, exported in files.items():
            (into / f"{name}.stablehlo").write_bytes(exported.serialize())
        write_tensors(into / WEIGHTS, {name: np.asarray(leaf) for name, leaf in named.items()})
        write_json(into / MANIFEST, manifest)
        shutil.copyfile(Path(__file__).with_name("stablehlo_run.py"), into / RUNNER)

    write_folder(folder, write)
    return [*files]


def _calls(config: StepConfig, weights: Any, tree: Tree | None, sizes: ExportSizes) -> dict[str, Call]:
    """Make every call, over shapes alone."""
    calls = Calls(config, Placement(None), None)
    pages = {"num_pages": sizes.batch * sizes.max_pages, "page_size": sizes.page_size, "max_pages": sizes.max_pages}
    begin = calls.begin(num_slots=sizes.batch, **pages)
    state = jax.eval_shape(lambda: step.init_state(config, num_slots=sizes.batch, **pages))
    scalar, one = _shape(), _shape(1)
    num_bytes = -(-config.target.vocab_size // 8)
    slots, width = _shape(sizes.batch), sizes.width
    found = {
        "begin": begin,
        "admit": calls.admit(state, scalar, _admission(config, sizes)),
        "prefill": calls.prefill(
            *(weights, state, one, one, _shape(1, dtype="bool"), _shape(1, 1, num_bytes, dtype="uint8")),
            chunk=sizes.chunk,
            width=width,
        ),
        "plain": calls.step(
            weights, state, slots, _shape(sizes.batch, 1, num_bytes, dtype="uint8"), tree=None, width=width
        ),
    }
    if tree is not None:
        found["speculative"] = calls.step(weights, state, slots, scalar, tree=tree, width=width)
    if config.max_pending:
        found["catch_up"] = calls.catch_up(weights, state, slots, number=0)
    return found


def _export(call: Call, platforms: Sequence[str]) -> jax.export.Exported:
    flat = call.flat()
    return jax.export.export(flat.function, platforms=tuple(platforms))(*map(shape_of, flat.arguments))


def _admission(config: StepConfig, sizes: ExportSizes) -> Admission:
    """Make the arrays that the slot of a greedy request starts with, without a prompt."""
    rows = sampler_rows(SamplingParams(temperature=0.0), 0)
    history: Any = np.zeros(sizes.max_pages * sizes.page_size, np.int32)
    page_row: Any = np.full(sizes.max_pages, sizes.batch * sizes.max_pages, np.int32)
    none: Any = np.int32(0)
    promise: Any = np.float32(0)
    return Admission(page_row, history, none, rows, blank_token_rows(config.target.vocab_size), promise)


def _manifest(
    models: Models,
    config: StepConfig,
    tree: Tree | None,
    sizes: ExportSizes,
    platforms: Sequence[str],
    calls: Mapping[str, Call],
    weights: Any,
) -> dict[str, Any]:
    """Make the manifest: how to call the programs, and what they take and return, in order."""
    state = calls["admit"].arguments[0]
    extra = {
        "begin": [],
        "admit": [("slot", calls["admit"].arguments[1]), ("admission", calls["admit"].arguments[2])],
        "prefill": [*zip(("slots", "num_tokens", "is_last", "allowed"), calls["prefill"].arguments[2:], strict=True)],
        "plain": [*zip(("slots", "allowed"), calls["plain"].arguments[2:], strict=True)],
        "speculative": [("slots", _shape(sizes.batch))],
        "catch_up": [("slots", _shape(sizes.batch))],
    }
    takes = {"begin": [], "admit": ["state"]}
    programs = {}
    for name, call in calls.items():
        own = [entry for part, tree_of in extra[name] for entry in _entries(tree_of, part)]
        results = [] if name in ("begin", "admit", "catch_up") else _results(call)
        programs[name] = {
            "file": f"{name}.stablehlo",
            "takes": [*takes.get(name, ["weights", "state"]), *own],
            "gives": ["state", *results],
        }
    return {
        "format": FORMAT,
        "target": models.name,
        "target_fingerprint": models.fingerprint,
        "draft_fingerprint": models.head_fingerprint,
        "speculation": describe(tree),
        "platforms": list(platforms),
        "sizes": {**dataclasses.asdict(sizes), "max_pages": sizes.max_pages, "vocab_size": config.target.vocab_size},
        "eos_ids": list(models.target.eos_ids),
        "counts": "of each sequence: draft tokens accepted (n), who proposed, and the tokens, of which n + 1 count",
        "max_pending": config.max_pending,
        "inputs": WHAT,
        "weights": _entries(weights),
        "state": _entries(state),
        "programs": programs,
        "admission": {entry["name"]: value for entry, value in _defaults(calls["admit"].arguments[2])},
        "provenance": provenance.collect(),
    }


def _results(call: Call) -> list[dict[str, Any]]:
    """List the results of a step besides the state."""
    _, result = jax.eval_shape(lambda *arguments: call.function(*arguments, **call.static), *call.arguments)
    assert isinstance(result, StepResult)
    return _entries(result)


def _defaults(admission: Admission) -> list[tuple[dict[str, Any], Any]]:
    """List the arrays of an admission, each with the one value that all of it has."""
    found = []
    for entry, leaf in zip(_entries(admission, "admission"), jax.tree.leaves(admission), strict=True):
        [value] = np.unique(np.asarray(leaf)).tolist()
        found.append((entry, value))
    return found


def _entries(tree: Any, prefix: str = "") -> list[dict[str, Any]]:
    """List the name, shape and dtype of every array, in the order of the leaves."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = ".".join(filter(None, (prefix, jax.tree_util.keystr(path, simple=True, separator="."))))
        found.append({"name": name, "shape": list(leaf.shape), "dtype": str(leaf.dtype)})
    return found


def _named(weights: Any) -> dict[str, Any]:
    names = [entry["name"] for entry in _entries(weights)]
    return dict(zip(names, jax.tree.leaves(weights), strict=True))


def _shape(*shape: int, dtype: str = "int32") -> Any:
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))
