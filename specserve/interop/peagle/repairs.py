"""Repairs of the files of a P-EAGLE head beside those of its EAGLE-3 network: another token in its masked slots."""

from collections.abc import Callable, Iterator

from specserve.interop.eagle3.dialects import MASK_KEYS, mask_ids
from specserve.interop.eagle3.head_files import EagleFiles
from specserve.interop.findings import Copy, Repair
from specserve.interop.repairs import masks


def list_masks(files: EagleFiles) -> Iterator[Repair]:
    """List every other token that may be the mask."""
    stated = next((i for i in mask_ids(files.raw).values() if type(i) is int), -1)
    for token in masks(files.target, stated) if files.target else ():
        yield Repair(f"masked slots hold token {token}", _put(token))


def _put(token: int) -> Callable[[Copy], None]:
    def fix(repaired: Copy) -> None:
        nested = repaired.raw.get("dflash_config")
        for place in (repaired.raw, repaired.layer, nested if isinstance(nested, dict) else {}):
            place.update({key: token for key in MASK_KEYS if key in place})

    return fix
