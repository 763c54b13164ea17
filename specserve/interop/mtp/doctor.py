"""The draft doctor of a layer of multi-token prediction: whether it belongs to the target, and whether all of it is
there and is numbers."""

from functools import partial
from pathlib import Path

import numpy as np

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG, TensorFolder, listed, read_json
from specserve.drafters.mtp.carried import own_names, shared_tables
from specserve.drafters.mtp.config import MtpConfig
from specserve.drafters.mtp.model import draft_spec
from specserve.errors import CheckpointError, ConfigError
from specserve.interop.findings import Check, DoctorReport, Finding
from specserve.interop.mtp import layouts
from specserve.interop.published import D2T, T2D
from specserve.models.families import model_config
from specserve.models.params import specs

_layer = partial(Check, "a layer of multi-token prediction")
UNREADABLE = _layer(
    "mtp-unreadable",
    "error",
    "it cannot be read as a layer of this target",
    why="no engine can run it beside the target",
    by_hand="give its own target (--target), or take the files from a whole checkpoint again",
)
TENSORS = _layer(
    "mtp-tensors",
    "error",
    "tensors are missing, or have another shape than the config says",
    why="no engine loads it",
    by_hand="copy the layer from the target's checkpoint again, or export it again",
)
STRANGE = _layer(
    "mtp-strange-tensors",
    "error",
    "tensors that are no part of such a layer",
    why="no engine loads it, or one that does leaves out what they were trained to do",
    by_hand="find out which layer they belong to; drop them if it is none of this",
)
NUMBERS = _layer(
    "mtp-not-finite",
    "error",
    "a tensor holds values that are not numbers or infinite",
    why="every draft is wasted work",
    by_hand="copy or download the files again",
)
VOCABULARY = _layer(
    "mtp-vocabulary",
    "error",
    "its tables do not say which tokens it proposes",
    why="it would propose other tokens than it was trained to",
    by_hand="export it again from its training folder",
)
CHECKS = (UNREADABLE, TENSORS, STRANGE, NUMBERS, VOCABULARY)


def examine(folder: Path, target: Target | None) -> DoctorReport:
    """Make all checks. Without a target, the layer's own config.json stands for it. Raises CheckpointError where there
    is nothing to look at."""
    tensors, raw = layouts.opened(folder), read_json(folder / CONFIG)
    findings: list[Finding] = []
    facts = {"kind": "a layer of multi-token prediction"}
    names = tensors.names()
    try:
        own = model_config(layouts.of_target(raw), dtype="float32", where=str(folder / CONFIG))
        wanted = target.config if target is not None else own
        config = layouts.read_config(folder, wanted, str(target.folder) if target else "its target", dtype="float32")
    except (ConfigError, CheckpointError) as error:
        findings.append(UNREADABLE.found(str(folder), "a layer of the target", str(error)))
    else:
        facts |= {
            "target": f"{own.family}, {own.num_layers} layers of {own.d_model}",
            "names": config.layout.fc,
            "vocabulary": f"{config.draft_vocab_size:,} of {own.vocab_size:,}",
        }
        findings += _look(tensors, config)
        names = own_names(names, config, layouts.name_in(names, config.layout))
    rows = [(name, tensors.shape(name), tensors.dtype(name).name) for name in sorted(names)]
    return DoctorReport(folder, "speculators" if layouts.LAYER_CONFIG in raw else "checkpoint", facts, rows, findings)


def _look(tensors: TensorFolder, config: MtpConfig) -> list[Finding]:
    findings = []
    names = tensors.names()
    stored = layouts.name_in(names, config.layout)
    wanted = {stored(name): spec.stored_shape for spec in specs(draft_spec(config)) for name in spec.names}
    lacking = [f"{name} {shape}" for name, shape in wanted.items() if name not in names]
    found = {name: tensors.shape(name) for name in wanted.keys() & names}
    odd = [f"{name} {shape}, not {wanted[name]}" for name, shape in sorted(found.items()) if shape != wanted[name]]
    if lacking or odd:
        findings.append(TENSORS.found("safetensors", "all of the layer", listed([*lacking, *odd])))
    own = own_names(names, config, layouts.name_in(names, config.layout))
    tables = {stored(name) for name in shared_tables(config.layer, config.layout)} | {D2T, T2D}
    scales = {name for name in own if "scale" in name.rsplit(".", 1)[-1]}
    if strange := sorted(own - wanted.keys() - tables - scales):
        findings.append(STRANGE.found("safetensors", "the layer alone", listed(strange)))
    try:
        layouts.read_target_ids(tensors, config, "its tables")
    except CheckpointError as error:
        findings.append(
            VOCABULARY.found("safetensors", f"{config.draft_vocab_size:,} tokens of the target", str(error))
        )
    broken = [name for name in sorted(own & wanted.keys()) if not _is_finite(tensors.read(name))]
    if broken:
        findings.append(NUMBERS.found("safetensors", "numbers", listed(broken)))
    return findings


def _is_finite(value: np.ndarray) -> bool:
    return bool(np.isfinite(value.astype(np.float32)).all())
