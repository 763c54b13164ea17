"""EAGLE-3 heads as folders: config.json and tensors, in any dialect; and the repairs of their files: other readings,
for slips of exports that no shape and no key shows, whose help is measured by running the head (`eval.trial`)."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from specserve.checkpoints.load import Target, to_numpy
from specserve.checkpoints.tensors import CONFIG, TensorFolder, read_json
from specserve.drafters.eagle3.config import Eagle3Config, default_taps
from specserve.drafters.eagle3.drafter import Eagle3
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.layers import windows_of
from specserve.errors import CheckpointError
from specserve.interop import gemma, repairs
from specserve.interop.eagle3 import dialects
from specserve.interop.eagle3.checks import OF_NETWORK, EagleFiles
from specserve.interop.eagle3.dialects import EAGLE, FLAGS, KEYS, OUTPUT_TAPS, TAP_IDS
from specserve.interop.findings import Dialect, Fix, Repair, put, refuse
from specserve.interop.format import EMBEDDING_TABLE, OUTPUT_TABLE, HeadFormat
from specserve.interop.keys import LAYER, KeyTable, architectures
from specserve.interop.notes import other_target
from specserve.interop.published import EMBEDDING, OUTPUT, present, target_table, vocab_to_tensors
from specserve.models.config import ModelConfig

_NORMS = (
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight",
    "norm.weight",
)
_UNWRITTEN_FLAGS = ("norm_output", "norm_before_residual")  # no tensor shows whether they are set
_TAPPED = ("low", "middle", "high")


def list_repairs(files: EagleFiles) -> Iterator[Repair]:
    """List all repairs that are worth a try. There are none where config.json does not state the head's shape."""
    config = files.config
    if config is None or files.target is None:
        return
    yield from _flags(config)
    if config.latent is None:
        yield from _heads(config, files.target.config.head_dim)
        attention = [f"midlayer.self_attn.{name}_proj.weight" for name in "qkv"]
        yield Repair(
            "q, k and v take the hidden state first and the embedding second",
            repairs.change(dialects.renamer, lambda weight: np.roll(weight, config.d_model, axis=1), *attention),
        )
        square = config.num_heads * config.head_dim == config.d_model
        yield from repairs.of_products(dialects.renamer, "midlayer", files.names, is_square=square)
    yield from repairs.exchanged(dialects.renamer, _NORMS, repairs.short_name)
    target, taps = files.target.config, config.aux_layers
    norms = [f"fc_norm.{i}.weight" for i in range(len(taps))] if config.fc_norm else []
    yield from repairs.tap_orders(dialects.renamer, _TAPPED if len(taps) == len(_TAPPED) else [*map(str, taps)], norms)
    usual = default_taps(target) if target.num_layers >= 5 else ()
    yield from repairs.tap_layers(taps, usual, target.num_layers, functools.partial(_set_taps, files.dialect))
    yield from repairs.of_windows(windows_of(config), files.stated, EAGLE)
    yield from repairs.of_target(config.norm_eps, config.rope, target, _put)


_put = repairs.put_everywhere(EAGLE, LAYER, at_top=FLAGS)


def _flags(config: Eagle3Config) -> Iterator[Repair]:
    for flag in _UNWRITTEN_FLAGS:
        value = not getattr(config, flag)
        yield Repair(f"{flag} is {str(value).lower()}", _put(**{flag: value}))


def _heads(config: Eagle3Config, target_head_dim: int) -> Iterator[Repair]:
    """List repairs that read the same matrices as heads of another width."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for size in dict.fromkeys((target_head_dim, 2 * config.head_dim, config.head_dim // 2)):
        if size < 2 or size % 2 or size == config.head_dim or queries % size or keys % size:
            continue
        heads = {"num_attention_heads": queries // size, "num_key_value_heads": keys // size, "head_dim": size}
        yield Repair(f"its {queries} query channels are {queries // size} heads of {size}", _put(**heads))


def _set_taps(dialect: Dialect, layers: tuple[int, ...]) -> Fix:
    counted = {TAP_IDS: dialects.COUNTED_FROM[dialect], OUTPUT_TAPS: 0}
    ids = {TAP_IDS: [i + counted[TAP_IDS] for i in layers]}
    unstated = put(EAGLE, use_aux_hidden_state=True, **ids) if dialect == "sglang" else put(**ids)
    return repairs.set_taps(_put, counted, layers, unstated)


class Eagle3Format(HeadFormat):
    """The layouts of EAGLE-3 heads (`dialects`)."""

    tables = (EMBEDDING_TABLE,)
    examined = EagleFiles
    keys: ClassVar[KeyTable] = KEYS
    checks = OF_NETWORK
    readings = (list_repairs,)

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        return bool(KEYS.classes & architectures(raw)) and not dialects.mask_ids(raw)

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> TrainedDrafter:
        names, where = TensorFolder(folder).names(), folder / CONFIG
        stated = self.keys.read(read_json(where), str(where))
        config = dialects.draft_config_from_hf(stated, target, names, dtype=dtype)
        refuse(dialects.check_output(stated, names), stated.where)
        if (config.vocab_size, config.target_d_model) != (target.vocab_size, target.d_model):
            theirs = f"vocabulary {config.vocab_size} and width {config.target_d_model}"
            raise other_target(folder, theirs, target_name, f"{target.vocab_size} and {target.d_model}")
        shared = {EMBEDDING: not config.has_embedding, OUTPUT: not config.has_own_head}
        if config.d_model != config.target_d_model and any(shared.values()):
            raise CheckpointError(
                f"{folder}: a head of width {config.d_model} without {' and '.join(present(shared))}, beside a target "
                f"of width {config.target_d_model}, whose own it cannot share; export it again with its own"
            )
        return Eagle3(config)

    def files(
        self, head: Head, target: Target, *, dtype: str, dialect: Dialect, target_name: str
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return the tensors and the config.json of a head in a dialect. Heads in the layout of speculators bring an
        embedding along; where one is shared that is the target's. Raises CheckpointError where it cannot be read."""
        config = head.drafter.config
        unsaid = present({"latent attention": config.latent, gemma.LAYERS: gemma.has_gemma_layers(config)})
        if dialect == "speculators" and unsaid:
            raise CheckpointError(f"a head with {unsaid[0]} cannot be written for speculators, which has none")
        tensors = to_numpy(head.params, head.drafter.spec(), dtype)
        tensors |= vocab_to_tensors(head.target_ids, config.vocab_size)
        for table in (EMBEDDING_TABLE, OUTPUT_TABLE) if dialect == "speculators" else ():
            if getattr(config, table.flag):
                continue
            own = target_table(target, dtype, table.own)
            if own is None:
                raise CheckpointError(
                    f"{target.folder}: no token {table.what}, which a head for speculators brings along; "
                    "give a target folder with its weights (--target)"
                )
            tensors[table.name] = own
        raw = dialects.draft_config_to_hf(config, target, dtype=dtype, dialect=dialect, target_name=target_name)
        return dialects.name_tensors(tensors, dialect), raw

    def unknown_to(self, dialect: Dialect, drafter: TrainedDrafter) -> list[str]:
        """List what of a head the engine of a dialect does not compute, as its public code reads today."""
        config = drafter.config
        found: dict[str, object] = {gemma.LAYERS: gemma.has_gemma_layers(config)}
        if dialect != "speculators":
            found["another activation than silu"] = config.activation != "silu"
        if dialect == "speculators":  # vLLM reads this layout too, and computes both
            found = {"a width that is not the target's": config.d_model != config.target_d_model}
            found["fc_norm with norm_before_fc"] = config.fc_norm and config.norm_before_fc
        if dialect != "vllm":
            found["latent attention"] = config.latent
        if dialect in ("sglang", "sglang-jax"):
            window, option = max(windows_of(config)), "--speculative-draft-window-size"
            found |= {"norms of queries and keys": config.qk_norm, "biases of attention": config.qkv_bias}
            found["biases of the MLP"] = config.mlp_bias
            found[f"a window that config.json states (SGLang: {option} {window})"] = window
        if dialect == "sglang-jax":
            found |= {flag: getattr(config, flag) for flag in FLAGS}
            found[f"{config.num_layers} layers"] = config.num_layers > 1
            found["an embedding of its own"] = config.has_embedding
            found["the target's output head"] = not config.has_own_head
            found["heads of which only a part turns"] = config.rope.rotary_dim > 0
            found[f"{len(config.aux_layers)} taps"] = len(config.aux_layers) != 3
        return present(found)
