"""The folder of a language model that drafts: a target's, with a tokenizer."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from specserve.checkpoints.load import Quantization, Target, is_whole, load_target
from specserve.checkpoints.tensors import CONFIG, TensorFolder, read_json
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.language_model.drafter import LANGUAGE_MODEL, LanguageModel
from specserve.errors import CheckpointError, ConfigError
from specserve.interop.format import HeadFormat
from specserve.interop.language_model.vocabulary import share_tokens
from specserve.models.config import ModelConfig
from specserve.models.families.table import model_config
from specserve.tokenizer import Tokenizer, check_files

logger = logging.getLogger(__name__)


def is_language_model(folder: Path, raw: Mapping[str, Any]) -> bool:
    """Return whether a folder holds a whole model of a family that targets may be of. Heads call themselves by the
    same names, and lack its final norm."""
    try:
        return is_whole(TensorFolder(folder).names(), model_config(raw, dtype="float32"))
    except (CheckpointError, ConfigError):
        return False


class LanguageModelFormat(HeadFormat):
    """The files of a language model. No config.json distinguishes it from a head: see `is_language_model`."""

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        return False

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> TrainedDrafter:
        config = model_config(read_json(folder / CONFIG), dtype=dtype, where=str(folder / CONFIG))
        return LANGUAGE_MODEL.new(None, config, config.vocab_size)

    def of_tensors(self, drafter: TrainedDrafter, tensors: TensorFolder, where: str, **_how: Any) -> Head:
        raise ConfigError(f"{where}: a language model that drafts comes with its tokenizer; give its folder")

    def load(self, folder: Path, target: Target, *, dtype: str, mesh: Mesh | None, quantization: Quantization) -> Head:
        drafter = self.read(folder, target.config, str(target.folder), dtype=dtype)
        for each in (target.folder, folder):
            check_files(each)
        shared = share_tokens(
            *(Tokenizer.load(target.folder), Tokenizer.load(folder)),
            vocab_size=target.config.vocab_size,
            draft_vocab_size=drafter.draft_vocab_size,
            where=str(folder),
        )
        logger.info("%s drafts as a language model: %s", folder.name, shared.what)

        def place(config: ModelConfig, _spec: Any, mesh: Mesh) -> Any:
            return LanguageModel(config).place(mesh)

        loaded = load_target(
            folder,
            dtype=dtype,
            quantization=quantization,
            mesh=mesh,
            is_served=True,
            place=place,
            option="--draft-quantization",
        )
        config = dataclasses.replace(loaded.config, cache_dtype="")  # a draft keeps what it computes
        return Head(LanguageModel(config), loaded.params, shared.target_ids, shared.draft_ids)
