"""Hold draft heads against the PyPI package `speculators`, an independent implementation in torch, and write
tests/goldens/speculators, peagle and mtp: heads as it saves them, with the draft logits that it computes.

Each head that we write, plain, with norm flags, with several layers, is exported with `--to speculators`, loaded by
its `Eagle3DraftModel`, run over two packed documents for three steps, and saved again; one head is its own from the
start. P-EAGLE heads are run by its `PEagleDraftModel` over one row, with masked slots where we draw them. A layer of
multi-token prediction is run by its `MTPDraftModel` for one step: further ones see other positions there than when
drafts are served, where those before the root have run once. Draft logits must agree to 1e-4. It needs both packages
in one environment:

    python -m venv /tmp/speculators
    /tmp/speculators/bin/pip install torch==2.13.0 speculators==0.9.0 -e .
    /tmp/speculators/bin/python tools/compare_speculators.py [--write]

`--write` replaces the golden files, which the suite checks without torch (tests/interop/test_speculators.py,
test_peagle_published.py, test_mtp_published.py).
"""

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # pyright: ignore[reportMissingImports]
from speculators.config import SpeculatorsConfig, VerifierConfig  # pyright: ignore[reportMissingImports]
from speculators.models.eagle3 import (  # pyright: ignore[reportMissingImports]
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
)
from speculators.models.mtp import (  # pyright: ignore[reportMissingImports]
    MTPDraftModel,
    MTPSpeculatorConfig,
)
from speculators.models.peagle import (  # pyright: ignore[reportMissingImports]
    PEagleDraftModel,
    PEagleSpeculatorConfig,
)
from speculators.models.peagle import core as peagle_core  # pyright: ignore[reportMissingImports]
from speculators.proposals.greedy import (  # pyright: ignore[reportMissingImports]
    GreedyTokenProposalConfig,
)
from transformers import LlamaConfig

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS / "support"))

import mtp_case  # noqa: E402  # pyright: ignore[reportMissingImports]
import peagle_case  # noqa: E402  # pyright: ignore[reportMissingImports]
import tiny  # noqa: E402  # pyright: ignore[reportMissingImports]
from speculators_case import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    CASES,
    DOCUMENTS,
    STEPS,
    TAPS,
    TARGET,
    WIDTH,
    Case,
    our_logits,
)

from specserve.checkpoints.tensors import TensorFolder  # noqa: E402
from specserve.drafters.interface import Head  # noqa: E402
from specserve.interop.convert import describe_target, export_head, import_head  # noqa: E402
from specserve.interop.head import load_head, save_head  # noqa: E402
from specserve.interop.published import vocab_to_tensors  # noqa: E402

GOLDENS = TESTS / "goldens"
TOLERANCE = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace tests/goldens/speculators, peagle and mtp")
    is_writing = parser.parse_args().write
    print(f"speculators {version('speculators')}, torch {torch.__version__}")
    is_equal = True
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)  # so that a head's verifier is "tiny" wherever this runs
        Path("tiny").mkdir()
        tiny.write_target(Path("tiny"), TARGET, seed=0)
        for name in (*CASES, "theirs"):
            folder = Path(name)
            case = Case.random(seed=len(name))
            exported = make_theirs(folder) if name == "theirs" else export_ours(folder, name)
            logits = their_logits(exported, case, folder / "saved")
            difference = np.abs(logits - read_back(folder / "saved", case)).max()
            is_equal &= bool(difference <= TOLERANCE)
            print(f"{name:8} largest difference of draft logits {difference:.1e} of {np.abs(logits).max():.1f}")
            case.save(folder / "saved" / "case.npz", logits)
        for name in peagle_case.CASES:
            is_equal &= compare_masked(Path("masked", name), name)
        for name in mtp_case.TARGETS:
            is_equal &= compare_carried(Path("carried", name), name)
        if is_writing and is_equal:
            code = shutil.ignore_patterns("*.py")  # it is saved along with a config
            made = {Path("speculators", name): Path(name) for name in (*CASES, "theirs")}
            made |= {Path("peagle", name): Path("masked", name) for name in peagle_case.CASES}
            made |= {Path("mtp", name): Path("carried", name) for name in mtp_case.TARGETS}
            for goldens, folder in made.items():
                shutil.rmtree(GOLDENS / goldens, ignore_errors=True)
                shutil.copytree(folder / "saved", GOLDENS / goldens, ignore=code)
    return 0 if is_equal else 1


def compare_masked(folder: Path, name: str) -> bool:
    """A P-EAGLE head of ours by both; it is left under `folder` as speculators saves it."""
    target = describe_target(Path("tiny"))
    changes = {"has_embedding": True, **peagle_case.CASES[name]}
    head = tiny.random_masked_head(target.config, seed=1, num_slots=peagle_case.SLOTS, **changes)
    case = peagle_case.Case.random(seed=len(name), num_taps=len(head.drafter.aux_layers))
    save_head(folder / "ours", head, target, dtype="float32", notes={})
    export_head(folder / "ours", folder / "exported", target, target_name="tiny", dialect="speculators")
    anchors, slots = peagle_case.elements(head.drafter.config, case.rows)  # type: ignore[attr-defined]
    is_there = anchors + slots < peagle_case.SEQ  # those past the row's end have nothing to learn
    logits = masked_logits(folder / "exported", case, anchors[is_there], slots[is_there], folder / "saved")
    import_head(folder / "saved", folder / "back", target, target_name="tiny")
    back = load_head(folder / "back", target, dtype="float32")
    difference = np.abs(logits - peagle_case.our_logits(back, case)[is_there]).max()
    print(f"P-EAGLE {name:8} largest difference of draft logits {difference:.1e} of {np.abs(logits).max():.1f}")
    case.save(folder / "saved" / "case.npz", logits)
    return bool(difference <= TOLERANCE)


def masked_logits(
    folder: Path, case: peagle_case.Case, anchors: np.ndarray, slots: np.ndarray, saved: Path
) -> np.ndarray:  # [element, draft_vocab]
    """What speculators computes of a folder, with these slots in place of those that it would draw, and then saves."""
    config = PEagleSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # the other one is for accelerators
    model = PEagleDraftModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    drawn = torch.from_numpy(anchors.astype(np.int64)), torch.from_numpy(slots.astype(np.int64))
    peagle_core.generate_cod_sample_indices = lambda **_settings: drawn
    peagle_core.compute_metrics = lambda **_logits: (None, {})  # its losses need an accelerator
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: found.append(logits.detach().clone()))
    ahead = np.append(case.token_ids, 0)[1:]
    with torch.no_grad():
        model(
            hidden_states=torch.from_numpy(case.aux_hidden_states)[None],
            input_ids=torch.from_numpy(ahead.astype(np.int64))[None],
            document_ids=torch.zeros(1, len(ahead), dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, len(ahead), peagle_case.WIDTH),
            num_depths=peagle_case.SLOTS,
        )
    model.save_pretrained(saved)
    return found[0][0].numpy()


def compare_carried(folder: Path, name: str) -> bool:
    """A layer of multi-token prediction of ours by both; it is left under `folder` as speculators saves it."""
    (folder / "tiny").mkdir(parents=True)
    tiny.write_target(folder / "tiny", mtp_case.TARGETS[name], seed=0)
    target, tensors = describe_target(folder / "tiny"), TensorFolder(folder / "tiny")
    tables = (tensors.read(f"{name}.weight") for name in ("model.embed_tokens", "lm_head"))
    case = mtp_case.Case.random(2, *tables)
    save_head(folder / "ours", mtp_case.random_layer(target), target, dtype="float32", notes={})
    verifier = str(folder / "tiny")
    export_head(folder / "ours", folder / "exported", target, target_name=verifier, dialect="speculators")
    config = MTPSpeculatorConfig.from_pretrained(folder / "exported")
    config.transformer_layer_config._attn_implementation = "eager"
    model = MTPDraftModel.from_pretrained(folder / "exported", config=config, dtype=torch.float32).eval()
    with torch.no_grad():
        found, _, _ = model(torch.from_numpy(case.token_ids)[None], torch.from_numpy(case.normed)[None])
    model.save_pretrained(folder / "saved")
    logits = found[0][0].numpy()
    import_head(folder / "saved", folder / "back", target, target_name="tiny")
    back = load_head(folder / "back", target, dtype="float32")
    difference = np.abs(logits - mtp_case.our_logits(back, case)[: len(logits)]).max()
    print(f"MTP {name:8} largest difference of draft logits {difference:.1e} of {np.abs(logits).max():.1f}")
    case.save(folder / "saved" / "case.npz", logits)
    return bool(difference <= TOLERANCE)


def export_ours(folder: Path, name: str) -> Path:
    """A random head of ours as `specserve export --to speculators` writes it."""
    target = describe_target(Path("tiny"))
    head = with_biases(tiny.random_head(target.config, seed=1, has_embedding=True, **CASES[name]))
    save_head(folder / "ours", head, target, dtype="float32", notes={})
    export_head(folder / "ours", folder / "exported", target, target_name="tiny", dialect="speculators")
    return folder / "exported"


def with_biases(head: Head) -> Head:
    """Biases are to matter, which begin as nothing."""
    rng = np.random.default_rng(1)

    def fill(x: jax.Array) -> jax.Array:
        return x if np.any(x) else jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype)

    return replace(head, params=jax.tree.map(fill, head.params))


def make_theirs(folder: Path) -> Path:
    """A random head that speculators makes and saves by itself."""
    torch.manual_seed(0)
    layer = LlamaConfig(
        vocab_size=TARGET["vocab_size"],
        hidden_size=WIDTH,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=TARGET["max_position_embeddings"],
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": TARGET["rope_theta"]},
    )
    proposal = GreedyTokenProposalConfig(speculative_tokens=STEPS)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=48,
        norm_before_residual=True,
        norm_output=True,
        fc_norm=True,
        eagle_aux_hidden_state_layer_ids=[i + 1 for i in TAPS],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="tiny", architectures=TARGET["architectures"]),
        ),
    )
    model = Eagle3DraftModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            is_norm = parameter.ndim == 1
            parameter.copy_(1 + 0.1 * torch.randn_like(parameter) if is_norm else 0.2 * torch.randn_like(parameter))
    chosen = np.sort(np.random.default_rng(0).permutation(TARGET["vocab_size"])[:48])
    tables = vocab_to_tensors(chosen, TARGET["vocab_size"])
    model.load_vocab_mappings(torch.from_numpy(tables["t2d"]), torch.from_numpy(tables["d2t"]))
    model.save_pretrained(folder / "made")
    return folder / "made"


def their_logits(folder: Path, case: Case, saved: Path) -> np.ndarray:  # [step, seq, draft_vocab]
    """What speculators computes of a folder, which it then saves in its own way."""
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # the other one is for accelerators
    model = Eagle3DraftModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: found.append(logits.detach().clone()))
    ahead = np.append(case.token_ids, 0)[1:]  # slot t has the feature of t and the token of t + 1
    with torch.no_grad():
        model(
            hidden_states=torch.from_numpy(case.aux_hidden_states)[None],
            input_ids=torch.from_numpy(ahead.astype(np.int64))[None],
            document_ids=torch.from_numpy(DOCUMENTS.astype(np.int64))[None],
            position_ids=torch.from_numpy(case.position_ids.astype(np.int64) + 1)[None],
            ttt_steps=STEPS,
        )
    model.save_pretrained(saved)
    return torch.stack(found)[:, 0].numpy()


def read_back(folder: Path, case: Case) -> np.ndarray:  # [step, seq, draft_vocab]
    """What we compute of a folder that speculators has saved, brought in by `specserve import`."""
    target = describe_target(Path("tiny"))
    import_head(folder, folder.with_name("imported"), target, target_name="tiny")
    return our_logits(load_head(folder.with_name("imported"), target, dtype="float32"), case)


if __name__ == "__main__":
    sys.exit(main())
