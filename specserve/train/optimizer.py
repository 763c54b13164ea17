"""The optimisers (optax) and the schedule."""

import math
from typing import Any, Literal

import jax
import optax
from optax.contrib import muon

from specserve.train.moments import in_eight_bits, on_host
from specserve.train.settings import TrainSettings

Schedule = Literal["cosine", "linear", "constant"]
FINAL_SCALE = 0.05  # of the peak learning rate, where it falls at all
# Of each Newton-Schulz iteration, the same for all (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).
# Given one by one, optax makes a loop of the iterations: unrolled, XLA's CPU backend fuses the sums of all of them with
# a transpose, and takes twice the time.
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5


def make_optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    """AdamW (0.9, 0.95), or Muon for the layer's matrices with AdamW for the rest, clipped, at the peak learning rate;
    the step scales its updates by `learning_rate_scale`. Raises ConfigError when its moments cannot be where the
    settings want them."""
    adam = optax.adamw(settings.lr, b1=0.9, b2=0.95, weight_decay=settings.weight_decay)
    if settings.optimizer == "muon":
        matrices = muon(settings.muon_lr, NEWTON_SCHULZ, adam_b2=0.95, weight_decay=settings.weight_decay)
        adam = optax.partition({"muon": matrices, "adam": adam}, _muon_labels)
    optimizer = optax.chain(optax.clip_by_global_norm(settings.clip), adam)
    if settings.moments == "int8":
        return in_eight_bits(optimizer)
    if settings.moments == "host":
        return on_host(optimizer)
    return optimizer


def learning_rate_scale(progress: float, warmup_share: float, schedule: Schedule) -> float:
    """Linear warm-up, then along a cosine or a line to 5%, or no fall. `progress` is the share of the run that is over,
    in steps or in minutes (whichever bound is nearer), so a run bounded by time also ends at a low rate."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup_share:
        return max(progress / warmup_share, 0.02)
    along = (progress - warmup_share) / (1 - warmup_share)
    left = {"cosine": (1 + math.cos(math.pi * along)) / 2, "linear": 1 - along, "constant": 1.0}[schedule]
    return FINAL_SCALE + (1 - FINAL_SCALE) * left


def _muon_labels(params: Any) -> Any:
    """Muon is for hidden matrices; the output head, the embedding and the norms stay with AdamW."""

    def label(path: tuple, leaf: jax.Array) -> str:
        name = path[0].name if isinstance(path[0], jax.tree_util.GetAttrKey) else ""
        return "muon" if leaf.ndim == 2 and name not in ("head", "embedding") else "adam"

    return jax.tree_util.tree_map_with_path(label, params)
