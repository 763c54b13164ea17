"""DFlash heads as folders: config.json and tensors, in either layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from specserve.checkpoints.load import Target, to_numpy
from specserve.checkpoints.tensors import CONFIG, TensorFolder, read_json
from specserve.drafters.dflash.drafter import DFlash
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.layers import windows_of
from specserve.errors import CheckpointError
from specserve.interop.dflash import dialects
from specserve.interop.dflash.catalogue import KEYS
from specserve.interop.dflash.checks import OF_BLOCKS, BlockFiles
from specserve.interop.dflash.repairs import list_repairs
from specserve.interop.findings import Dialect
from specserve.interop.format import EMBEDDING_TABLE, OUTPUT_TABLE, HeadFormat
from specserve.interop.key_checks import refuse_keys
from specserve.interop.notes import other_target
from specserve.interop.published import present, vocab_to_tensors
from specserve.models.config import ModelConfig


class DFlashFormat(HeadFormat):
    """The layouts of block drafters (`dialects`)."""

    skipped: ClassVar[Mapping[str, str]] = dialects.SKIPPED
    tables = (EMBEDDING_TABLE, OUTPUT_TABLE)
    examined = BlockFiles
    checks = OF_BLOCKS
    readings = (list_repairs,)

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        return dialects.kind_named(raw) == self.kind

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> TrainedDrafter:
        names, stated = TensorFolder(folder).names(), KEYS.read(read_json(folder / CONFIG), str(folder / CONFIG))
        refuse_keys(stated, dialects.OF_KEYS)
        got = dialects.sizes_of_target(stated, target)
        if got != (target.vocab_size, target.d_model, target.num_layers):
            theirs = "vocabulary {}, width {} and {} layers".format(*got)
            given = f"{target.vocab_size}, {target.d_model} and {target.num_layers}"
            raise other_target(folder, theirs, target_name, given)
        config = dialects.config_from_hf(stated, target, names, dtype=dtype)
        if config.backbone.d_model != target.d_model:
            raise CheckpointError(
                f"{folder}: a head of width {config.backbone.d_model} beside a target of width {target.d_model}, whose "
                "hidden states and output head it cannot share; a head of this kind is as wide as its target"
            )
        return DFlash(config)

    def files(
        self, head: Head, target: Target, *, dtype: str, dialect: Dialect, target_name: str
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return the tensors and the config.json of a head. Raises CheckpointError where the layout has no key for what
        the head computes."""
        config = head.drafter.config
        layout: dialects.Layout = "speculators" if dialect == "speculators" else "z-lab"
        if unsaid := dialects.unsaid_in(layout, config):
            raise CheckpointError(
                f"a head with {', '.join(unsaid)} cannot be written for {dialect}, which has no key for it"
            )
        tensors = to_numpy(head.params, head.drafter.spec(), dtype)
        if dialects.is_partial(config):
            tensors |= vocab_to_tensors(head.target_ids, config.backbone.vocab_size)
        return tensors, dialects.config_to_hf(config, target, dtype=dtype, layout=layout, target_name=target_name)

    def unknown_to(self, dialect: Dialect, drafter: TrainedDrafter) -> list[str]:
        """List what of a head the engine that a dialect is for does not compute, as its public code reads today."""
        config = drafter.config
        found: dict[str, object] = {
            "an embedding of its own": config.has_embedding,
            "an output head of its own": config.has_head,
            "attention sinks": config.backbone.has_sinks,
        }
        if dialect == "vllm":
            found = {"scales of its embedding or its logits": (config.embedding_scale, config.output_scale) != (1, 1)}
        elif dialect == "speculators":  # vLLM reads these too, and makes all layers causal where windows are
            is_mixed = len({*config.is_causal}) > 1 and len({*windows_of(config.backbone)}) > 1
            found = {"layers that see all beside causal ones": is_mixed}
        if dialect != "speculators":
            found["a Markov head that is gated or recurrent"] = config.markov_type != "vanilla"
        if dialect != "sglang":
            found["a recurrent correction of its logits"] = config.gru_width
        if dialect == "sglang-jax" and config.name == "dflash2":
            found = {"convolutions and the choice among candidates": True}
        return present(found)
