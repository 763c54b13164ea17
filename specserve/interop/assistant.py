"""Gemma 4's assistants as they are published: a config.json around that of a Gemma 4 whose layers have no keys of their
own. They are read, and not written."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Quantization, Target, load_params
from specserve.checkpoints.tensors import CONFIG, TensorFolder, read_json
from specserve.checkpoints.unused import AS_VOCABULARY, TIED
from specserve.drafters.gemma_assistant.config import AssistantConfig
from specserve.drafters.gemma_assistant.drafter import Assistant
from specserve.drafters.gemma_assistant.model import ORDERING, AssistantParams
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.errors import CheckpointError, ConfigError
from specserve.interop.findings import Dialect
from specserve.interop.format import HeadFormat
from specserve.interop.key_checks import is_read
from specserve.interop.keys import HARMLESS, QUANTIZATIONS, architectures, inner
from specserve.interop.notes import other_target
from specserve.mesh import put
from specserve.models.cache import DRAFT_REACH
from specserve.models.config import LayerKind, ModelConfig
from specserve.models.families.keys import Keys
from specserve.models.families.table import model_config
from specserve.models.sharding import spread_kv_heads

CLASSES = frozenset(("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"))
_SIZES = ("backbone_hidden_size", "num_centroids", "centroid_intermediate_top_k", "use_ordered_embeddings")
_OF_TEXT = ("enable_moe_block", "use_double_wide_mlp", "hidden_size_per_layer_input")
_OF_INPUTS = "vocab_size_per_layer_input"  # of inputs that there are not
_TOKENS = frozenset(f"{name}_token_id" for name in ("boi", "eoi", "boa", "eoa")) | {"eoa_token_index"}


class AssistantFormat(HeadFormat):
    """The layout of transformers."""

    skipped: ClassVar[Mapping[str, str]] = {r"lm_head\.weight": TIED}

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        return not CLASSES.isdisjoint(architectures(raw))

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> TrainedDrafter:
        raw, where = read_json(folder / CONFIG), str(folder / CONFIG)
        config = _config(raw, target, where, dtype)
        own, layers = (config.target_d_model, config.layers.vocab_size), config.layers
        if own != (target.d_model, target.vocab_size):
            theirs = f"width {own[0]} and vocabulary {own[1]}"
            raise other_target(folder, theirs, target_name, f"{target.d_model} and {target.vocab_size}")
        for kind in layers.layers:
            assert kind.kv_from is not None
            mine, theirs = layers.of(kind), target.of(target.kind(kind.kv_from))
            if mine.head_dim != theirs.head_dim or layers.num_heads % theirs.num_kv_heads:
                heads = f"{layers.num_heads} heads of {mine.head_dim}"
                given = f"{theirs.num_kv_heads} of {theirs.head_dim} in layer {kind.kv_from}"
                raise other_target(folder, f"keys for {heads}", target_name, given)
        return Assistant(config)

    def load(self, folder: Path, target: Target, *, dtype: str, mesh: Mesh | None, quantization: Quantization) -> Head:
        drafter = self.read(folder, target.config, str(target.folder), dtype=dtype)
        spread, heads = spread_kv_heads(target.config, mesh), drafter.config.layers.num_heads
        most = max(spread.of(spread.kind(kind.kv_from)).num_kv_heads for kind in drafter.config.layers.layers)
        if heads % most:
            raise ConfigError(
                f"{folder}: an assistant of {heads} heads reads the target's own pages, where this mesh has {most} KV "
                "heads, one for each device; give a smaller --mesh tensor=N"
            )
        return super().load(folder, target, dtype=dtype, mesh=mesh, quantization=quantization)

    def params(self, drafter: Any, tensors: TensorFolder, dtype: str, how: dict[str, Any]) -> AssistantParams:
        if drafter.spec().ordering is None:
            return super().params(drafter, tensors, dtype, how)
        ordering, places = _ordering(tensors, drafter.vocab_size), how["shardings"]
        how |= {"shardings": places and dataclasses.replace(places, ordering=None)}
        how |= {"skipped": how["skipped"] | {re.escape(ORDERING): AS_VOCABULARY}}
        params = load_params(dataclasses.replace(drafter.spec(), ordering=None), tensors, dtype, **how)
        return dataclasses.replace(params, ordering=put(ordering, places and places.ordering))

    def files(
        self, head: Head, target: Target, *, dtype: str, dialect: Dialect, target_name: str
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        raise CheckpointError("an assistant is not written anew; copy the folder that it was published in")


def _ordering(tensors: TensorFolder, vocab_size: int) -> np.ndarray:  # [vocab] float32
    """Read the tokens in the order of their clusters. Raises CheckpointError unless each token is there once."""
    found = tensors.read(ORDERING) if ORDERING in tensors.names() else np.zeros(0)
    if not np.array_equal(np.sort(found), np.arange(vocab_size)):
        raise CheckpointError(f"{tensors.folder}: {ORDERING} must name each of the {vocab_size} tokens once")
    return found.astype(np.float32)


def _config(raw: Mapping[str, Any], target: ModelConfig, where: str, dtype: str) -> AssistantConfig:
    """Read an assistant's config.json beside its target. Raises ConfigError."""
    known = {*_SIZES, *_TOKENS, *HARMLESS, "text_config", "tie_word_embeddings", *QUANTIZATIONS}
    keys, text = Keys(raw, where), inner(raw, "text_config")
    of_text = Keys(text, f"{where}: text_config")
    for each in (keys, of_text):
        each.must_be("tie_word_embeddings", True)
    for key in _OF_TEXT:
        of_text.must_be(key, False, 0)
    of_text.must_be("num_kv_shared_layers", 0, of_text.num_layers)
    plain = {**text, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True}
    layers = model_config(plain, dtype=dtype, where=f"{where}: text_config")
    unknown = {key: value for key, value in raw.items() if key not in known}
    unread = text.keys() - {*HARMLESS, *_TOKENS, *QUANTIZATIONS, _OF_INPUTS}
    unknown |= {f"text_config.{key}": text[key] for key in unread if not is_read(plain, key)}
    if names := sorted(key for key, value in unknown.items() if value is not None):
        raise ConfigError(f"{where}: {', '.join(names)}: not known to us, so it might be computed as another one")
    kinds = tuple(_reading(kind, target, where) for kind in layers.layers)
    layers = dataclasses.replace(layers, layers=kinds, max_len=min(layers.max_len, target.max_len))
    clusters: dict[str, int] = {}
    if keys.flag("use_ordered_embeddings"):
        number, chosen = keys.integer("num_centroids", 2048), keys.integer("centroid_intermediate_top_k", 32)
        if layers.vocab_size % number or chosen > number:
            raise ConfigError(
                f"{where}: num_centroids {number} must divide the {layers.vocab_size} tokens, and "
                f"centroid_intermediate_top_k {chosen} be no more"
            )
        clusters = {"num_centroids": number, "num_chosen": chosen}
    return AssistantConfig(
        layers=layers,
        target_d_model=keys.integer("backbone_hidden_size", 1536),
        num_target_layers=target.num_layers,
        target_norm_eps=target.norm_eps,
        target_embedding_scale=target.embedding_scale,
        **clusters,
    )


def _reading(kind: LayerKind, target: ModelConfig, where: str) -> LayerKind:
    """Return the layer with the keys and values of the target's last own layer with a window, or without one. Raises
    ConfigError where the target has none."""
    own = [i for i, each in enumerate(target.layers) if each.kv_from is None and bool(each.window) == bool(kind.window)]
    if not own or not target.has_value_norm:
        raise ConfigError(
            f"{where}: an assistant of a Gemma 4, beside a {target.family} target, whose cache is another"
        )
    # a query at the root's place sees the last `window` + 1 committed tokens, which end one before it
    window = kind.window and kind.window + DRAFT_REACH
    return dataclasses.replace(kind, kv_from=own[-1], values_are_keys=False, window=window)
