"""The draft doctor of a layer of multi-token prediction: whether it belongs to the target, and whether all of it is
there and is numbers."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from specserve.checkpoints.tensors import CONFIG, TensorFolder, listed
from specserve.drafters.mtp.carried import own_names, shared_tables
from specserve.drafters.mtp.config import MtpConfig
from specserve.drafters.mtp.model import draft_spec
from specserve.errors import CheckpointError, ConfigError, SpecServeError
from specserve.interop.examined import ExaminedFiles
from specserve.interop.findings import Finding, read_checks
from specserve.interop.keys import LAYER
from specserve.interop.mtp import layouts
from specserve.interop.published import D2T, T2D
from specserve.models.config import ModelConfig
from specserve.models.families import model_config
from specserve.models.params import specs

CHECKS = read_checks("""
[a layer of multi-token prediction]
mtp-unreadable error: it cannot be read as a layer of this target
  no engine can run it beside the target
  by hand: give its own target (--target), or take the files from a whole checkpoint again
mtp-tensors error: tensors are missing, or have another shape than the config says
  no engine loads it
  by hand: copy the layer from the target's checkpoint again, or export it again
mtp-strange-tensors error: tensors that are no part of such a layer
  no engine loads it, or one that does leaves out what they were trained to do
  by hand: find out which layer they belong to; drop them if it is none of this
mtp-not-finite error: a tensor holds values that are not numbers or infinite
  every draft is wasted work
  by hand: copy or download the files again
mtp-vocabulary error: its tables do not say which tokens it proposes
  it would propose other tokens than it was trained to
  by hand: export it again from its training folder
""")


class MtpFiles(ExaminedFiles):
    """The files of a layer. Without a target, the layer's own config.json stands for it."""

    def open(self, folder: Path) -> TensorFolder:
        return layouts.opened(folder)

    @property
    def dialect(self) -> str:
        return "speculators" if LAYER in self.raw else "checkpoint"

    @cached_property
    def read(self) -> MtpConfig | SpecServeError:
        """The layer's shape, or why it cannot be read."""
        try:
            target = self.target.config if self.target else self.of_target
            name = str(self.target.folder) if self.target else "its target"
            config = layouts.read_config(self.folder, target, name, dtype="float32")
            if self.target:
                layouts.check_keys(self.folder, self.target)
            return config
        except (ConfigError, CheckpointError) as error:
            return error

    @cached_property
    def of_target(self) -> ModelConfig:
        """The shape of the target that the layer is of, as its config.json states it. Raises ConfigError."""
        return model_config(layouts.of_target(self.raw), dtype="float32", where=str(self.folder / CONFIG))

    def own(self, config: MtpConfig) -> frozenset[str]:
        """Return the names of the layer's tensors, in a folder that may hold a whole target."""
        return own_names(self.names, config, layouts.name_in(self.names, config.layout))

    def rows(self) -> list[tuple[str, tuple[int, ...], str]]:
        config = self.read
        own = self.own(config) if isinstance(config, MtpConfig) else self.names
        return [row for row in super().rows() if row[0] in own]

    def facts(self) -> dict[str, str]:
        facts, config = {"kind": "a layer of multi-token prediction"}, self.read
        if not isinstance(config, MtpConfig):
            return facts
        return facts | {
            "target": f"{self.of_target.family}, {self.of_target.num_layers} layers of {self.of_target.d_model}",
            "names": config.layout.fc,
            "vocabulary": f"{config.draft_vocab_size:,} of {self.of_target.vocab_size:,}",
        }


def check_layer(files: MtpFiles) -> Iterator[Finding]:
    """Check that it is a layer of the target, and that all of it is there and is numbers."""
    config, names, where = files.read, files.names, "safetensors"
    if not isinstance(config, MtpConfig):
        yield CHECKS["mtp-unreadable"].found(str(files.folder), "a layer of the target", str(config))
        return
    stored = layouts.name_in(names, config.layout)
    required = {stored(name): spec.stored_shape for spec in specs(draft_spec(config)) for name in spec.names}
    lacking = [f"{name} {shape}" for name, shape in required.items() if name not in names]
    found = {name: files.tensors.shape(name) for name in required.keys() & names}
    odd = [f"{name} {shape}, not {required[name]}" for name, shape in sorted(found.items()) if shape != required[name]]
    if lacking or odd:
        yield CHECKS["mtp-tensors"].found(where, "all of the layer", listed([*lacking, *odd]))
    own = files.own(config)
    tables = {stored(name) for name in shared_tables(config.layer, config.layout)} | {D2T, T2D}
    scales = {name for name in own if "scale" in name.rsplit(".", 1)[-1]}
    if strange := sorted(own - required.keys() - tables - scales):
        yield CHECKS["mtp-strange-tensors"].found(where, "the layer alone", listed(strange))
    try:
        layouts.read_target_ids(files.tensors, config, "its tables")
    except CheckpointError as error:
        expected = f"{config.draft_vocab_size:,} tokens of the target"
        yield CHECKS["mtp-vocabulary"].found(where, expected, str(error))
    if broken := [name for name in sorted(own & required.keys()) if not _is_finite(files.tensors.read(name))]:
        yield CHECKS["mtp-not-finite"].found(where, "numbers", listed(broken))


def _is_finite(value: np.ndarray) -> bool:
    return bool(np.isfinite(value.astype(np.float32)).all())
