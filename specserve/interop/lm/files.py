"""The folder of a language model that drafts: a target's, with a tokenizer."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target, load_target
from specserve.checkpoints.tensors import CONFIG, TensorFolder, read_json
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.lm.drafter import LanguageModel
from specserve.drafters.mtp.carried import is_whole
from specserve.errors import CheckpointError, ConfigError
from specserve.interop.findings import Dialect
from specserve.interop.format import HeadFormat
from specserve.interop.lm.vocabulary import share_tokens
from specserve.models.config import ModelConfig
from specserve.models.families import model_config
from specserve.tokenizer import Tokenizer, check_files

logger = logging.getLogger(__name__)


def is_language_model(folder: Path, raw: Mapping[str, Any]) -> bool:
    """Return whether a folder holds a whole model of a family that targets may be of. Heads call themselves by the
    same names, and lack its final norm."""
    try:
        return is_whole(TensorFolder(folder).names(), model_config(raw, dtype="float32"))
    except (CheckpointError, ConfigError):
        return False


class LmFormat(HeadFormat):
    """The files of a language model, which no config.json tells from those of a head (`is_language_model`)."""

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        return False

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> TrainedDrafter:
        return drafter_of(
            model_config(read_json(folder / CONFIG), dtype=dtype, where=str(folder / CONFIG)), str(folder)
        )

    def load(self, folder: Path, target: Target, *, dtype: str, mesh: Mesh | None) -> Head:
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

        loaded = load_target(folder, dtype=dtype, mesh=mesh, is_served=True, place=place)
        return Head(LanguageModel(loaded.config), loaded.params, shared.target_ids, shared.draft_ids)

    def files(
        self, head: Head, target: Target, *, dtype: str, dialect: Dialect, target_name: str
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        raise CheckpointError(
            "this draft is a language model, of which there is nothing to convert: other engines take its folder as it "
            "is (vLLM as draft_model, SGLang as STANDALONE)"
        )


def drafter_of(config: ModelConfig, name: str) -> LanguageModel:
    """Return the drafter that a language model of this config is. Raises ConfigError where it keeps recurrent
    states."""
    if config.is_recurrent:
        raise ConfigError(
            f"--draft {name}: {config.family} has layers that keep a recurrent state, which holds no older one to go "
            "back to where a draft is rejected; give a draft whose layers all attend"
        )
    return LanguageModel(config)
