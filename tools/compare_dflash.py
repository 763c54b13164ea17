"""Hold block drafters against the PyPI packages `dflash` and `speculators`, independent implementations in torch, and
write tests/goldens/dflash: heads as they save them, with the draft logits that they computed.

Each head that we write is loaded by `dflash.DFlashDraftModel` (z-lab's layout) or by speculators' `DFlashDraftModel`
(its own), runs blocks behind a few anchors of a row, and is saved again. Draft logits must agree to 1e-4. It needs
everything in one environment:

    python -m venv /tmp/published
    /tmp/published/bin/pip install torch==2.13.0 speculators==0.9.0 dflash==0.1.0 -e .
    /tmp/published/bin/python tools/compare_dflash.py [--write]

`--write` replaces the golden files, which the suite checks without torch (tests/interop/test_dflash_published.py).

The two packages do not agree on windows: in `dflash`, as in vLLM, slot k of a block sees the W - 1 tokens before its
own position, and in the training of speculators every slot sees the W tokens before its anchor. We compute the former,
which is what serves; heads of speculators are compared where the window is as long as the row.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # pyright: ignore[reportMissingImports]
from dflash import DFlash2DraftModel, DFlashDraftModel  # pyright: ignore[reportMissingImports]
from speculators.models import dflash, dflash2, dspark  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F  # pyright: ignore[reportMissingImports]

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS / "support"))

import tiny  # noqa: E402  # pyright: ignore[reportMissingImports]
from dflash_case import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    ANCHORS,
    BLOCK,
    LENGTH,
    NOTHING,
    PREVIOUS,
    SPECULATORS,
    TARGET,
    Z_LAB,
    Case,
    our_logits,
    random_head,
)

from specserve.interop.convert import describe_target, export_head, import_head  # noqa: E402
from specserve.interop.head import load_head, save_head  # noqa: E402

GOLDENS = TESTS / "goldens" / "dflash"
TOLERANCE = 1e-4
SPECULATORS_TYPES = {
    "dflash": (dflash.DFlashSpeculatorConfig, dflash.DFlashDraftModel),
    "dspark": (dspark.DSparkSpeculatorConfig, dspark.DSparkDraftModel),
    "dflash2": (dflash2.DFlash2SpeculatorConfig, dflash2.DFlash2DraftModel),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace tests/goldens/dflash")
    is_writing = parser.parse_args().write
    print(f"dflash {version('dflash')}, speculators {version('speculators')}, torch {torch.__version__}")
    is_equal = True
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)  # so that a head's verifier is "tiny" wherever this runs
        Path("tiny").mkdir()
        tiny.write_target(Path("tiny"), TARGET, seed=0)
        target = describe_target(Path("tiny"))
        runs = [("dflash", name) for name in Z_LAB] + [("speculators", name) for name in SPECULATORS]
        for package, name in runs:
            folder, case = Path(f"{package}-{name}"), Case.random(seed=len(name))
            head = random_head(target, (Z_LAB if package == "dflash" else SPECULATORS)[name])
            save_head(folder / "ours", head, target, dtype="float32", notes={})
            dialect = "vllm" if package == "dflash" else "speculators"
            export_head(folder / "ours", folder / "exported", target, target_name="tiny", dialect=dialect)
            run = z_lab_logits if package == "dflash" else speculators_logits
            logits = run(folder / "exported", case, folder / "saved")
            import_head(folder / "saved", folder / "back", target, target_name="tiny")
            ours = our_logits(load_head(folder / "back", target, dtype="float32"), case)
            difference = max(np.abs(one - other).max() for one, other in zip(logits, ours, strict=True))
            is_equal &= bool(difference <= TOLERANCE)
            print(f"{folder!s:20} largest difference of draft logits {difference:.1e} of {np.abs(logits[0]).max():.1f}")
            case.save(folder / "saved" / "case.npz", logits)
        if is_writing and is_equal:
            shutil.rmtree(GOLDENS, ignore_errors=True)
            for package, name in runs:
                folder = f"{package}-{name}"
                shutil.copytree(Path(folder) / "saved", GOLDENS / folder, ignore=shutil.ignore_patterns("*.py"))
    return 0 if is_equal else 1


def z_lab_logits(folder: Path, case: Case, saved: Path) -> list[np.ndarray]:  # as `our_logits`
    """What the package `dflash` computes of a folder, which it then saves in its own way."""
    is_second = json.loads((folder / "config.json").read_text())["architectures"] == ["DFlash2DraftModel"]
    model = (DFlash2DraftModel if is_second else DFlashDraftModel).from_pretrained(folder, dtype=torch.float32).eval()
    embedding, head = torch.from_numpy(case.embedding), torch.from_numpy(case.head)
    scale = model.config.dflash_config.get("input_embedding_scale", 1.0)
    found, scores = [], []
    for anchor in ANCHORS:
        block = torch.full((1, BLOCK), model.mask_token_id)
        block[0, 0] = int(case.token_ids[anchor])
        with torch.no_grad():
            hidden = model(
                position_ids=torch.arange(anchor + BLOCK)[None],
                noise_embedding=F.embedding(block, embedding) * scale,
                target_hidden=torch.from_numpy(case.aux_hidden_states[:anchor])[None],
            )
            found.append(model.compute_logits(hidden[:, 1:], lambda states: F.linear(states, head))[0])
            if is_second:
                scores.append(z_lab_scores(model.candidate_selector, hidden[0, 1:], found[-1]))
    model.save_pretrained(saved)
    return [torch.stack(each).numpy() for each in (found, scores) if each]


def z_lab_scores(selector: Any, hidden: Any, logits: Any) -> Any:  # [slot, PREVIOUS, vocab]
    """What its walk says of every slot after a few tokens: it starts anew at each, with logits that are kept."""
    kept: list[Any] = []
    argmax, torch.argmax = torch.argmax, lambda scores, dim: kept.append(scores) or argmax(scores, dim=dim)
    try:
        for slot in range(len(hidden)):
            for token in PREVIOUS:
                at = slice(slot, slot + 1)
                _, candidates, _ = selector.select(hidden[None, at], logits[None, at], torch.tensor([token]), 0.0)
                dense = torch.full((logits.shape[-1],), NOTHING)
                kept[-1] = dense.scatter(0, candidates[0, 0], kept[-1][0])
    finally:
        torch.argmax = argmax
    return torch.stack(kept).view(len(hidden), len(PREVIOUS), -1)


def speculators_logits(folder: Path, case: Case, saved: Path) -> list[np.ndarray]:  # as `our_logits`
    """What speculators computes of a folder, which it then saves in its own way."""
    kind = json.loads((folder / "config.json").read_text())["speculators_model_type"]
    config_type, model_type = SPECULATORS_TYPES[kind]
    config = config_type.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # the other one is for accelerators
    model = model_type.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.embed_tokens.weight.copy_(torch.from_numpy(case.embedding))
        if not model.use_draft_vocab:
            model.lm_head.weight.copy_(torch.from_numpy(case.head))
        is_anchor = torch.zeros(1, LENGTH)
        is_anchor[0, list(ANCHORS)] = 1
        hidden, logits, *_ = model._backbone_forward(
            torch.from_numpy(case.aux_hidden_states)[None],
            torch.from_numpy(case.token_ids.astype(np.int64))[None],
            is_anchor,
            torch.zeros(1, LENGTH, case.embedding.shape[1]),
            torch.zeros(1, LENGTH, dtype=torch.long),
            max_anchors=len(ANCHORS),
        )
        first = 0 if config.sample_from_anchor else 1
        hidden, logits = (x.view(len(ANCHORS), BLOCK, -1)[:, first:] for x in (hidden, logits))
        more = speculators_joint(model, kind, hidden, logits)
    model.save_pretrained(saved)
    return [logits.numpy(), *(each.numpy() for each in more)]


def speculators_joint(model: Any, kind: str, hidden: Any, logits: Any) -> list[Any]:
    """What its further heads say of every slot after a few tokens, as `dflash_case._joint` does."""
    if kind == "dflash":
        return []
    anchors, slots, _ = hidden.shape
    previous = torch.tensor(PREVIOUS).expand(anchors, slots, len(PREVIOUS))
    hidden, logits = (x[:, :, None].expand(-1, -1, len(PREVIOUS), -1) for x in (hidden, logits))
    if kind == "dflash2":
        candidates, scores = model.candidate_selector.select(logits, hidden, previous)
        return [torch.full_like(logits, NOTHING).scatter(-1, candidates, scores)]
    head = model.markov_head
    embedded = head.prev_embeddings(previous)
    inputs = torch.cat([hidden, embedded], dim=-1) if model.config.confidence_head_with_markov else hidden
    flat = hidden.reshape(-1, 1, hidden.shape[-1])  # blocks of one slot each, with which a path begins
    bias = head.block_bias(prev_token_ids=previous.reshape(-1, 1), hidden_states=flat).view(logits.shape)
    return [logits + bias, model.confidence_head(inputs)]


if __name__ == "__main__":
    sys.exit(main())
