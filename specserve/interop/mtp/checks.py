"""The files of a layer of multi-token prediction under examination: whether it is one of the target, and whether all
of it is there."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from specserve.checkpoints.tensors import CONFIG, TensorFolder
from specserve.drafters.mtp.carried import own_names, shared_tables
from specserve.drafters.mtp.config import MtpConfig
from specserve.drafters.mtp.model import draft_spec
from specserve.interop.examined import ExaminedFiles, check_specs, check_tables, given
from specserve.interop.findings import Finding
from specserve.interop.keys import LAYER
from specserve.interop.mtp import layouts
from specserve.models.config import ModelConfig
from specserve.models.families import model_config
from specserve.models.params import specs


class MtpFiles(ExaminedFiles):
    """The files of a layer. Without a target, the layer's own config.json stands for it."""

    def open(self, folder: Path) -> TensorFolder:
        return layouts.opened(folder)

    @property
    def dialect(self) -> str:
        return "speculators" if LAYER in self.raw else "checkpoint"

    def make(self) -> MtpConfig:
        target = self.target.config if self.target else self.of_target
        name = str(self.target.folder) if self.target else "its target"
        config = layouts.read_config(self.folder, target, name, dtype="float32")
        if self.target:
            layouts.check_keys(self.folder, self.target)
        self.rename = layouts.name_in(self.names, config.layout)
        return config

    @cached_property
    def of_target(self) -> ModelConfig:
        """The shape of the target that the layer is of, as its config.json states it. Raises ConfigError."""
        return model_config(layouts.of_target(self.raw), dtype="float32", where=str(self.folder / CONFIG))

    @property
    def own_names(self) -> frozenset[str]:
        """The names of the layer's tensors, in a folder that may hold a whole target."""
        return own_names(self.names, self.config, self.rename) if self.config else self.names

    def facts(self) -> dict[str, str]:
        facts, config = {"kind": "a layer of multi-token prediction"}, self.config
        if config is None:
            return facts
        return facts | {
            "target": f"{self.of_target.family}, {self.of_target.num_layers} layers of {self.of_target.d_model}",
            "names": config.layout.fc,
            "vocabulary": f"{config.draft_vocab_size:,} of {self.of_target.vocab_size:,}",
        }


@given("config")
def check_layer(files: MtpFiles, config: MtpConfig) -> Iterator[Finding]:
    """Check that all of the layer is there, and which tokens it proposes."""
    shared = {files.rename(name) for name in shared_tables(config.layer, config.layout)}
    yield from check_specs(
        files, specs(draft_spec(config)), lambda name: name in shared or "scale" in name.rsplit(".", 1)[-1]
    )
    if config.is_partial:
        yield from check_tables(files, config.draft_vocab_size, config.layer.vocab_size)
