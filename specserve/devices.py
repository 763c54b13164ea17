"""Accelerators as their makers describe them: what they compute, hold, read and send.

The table is `targets/devices.json`. Rates of networks are published for both directions together, or in bits; here they
are bytes per second in one direction. A device that is not in the table is measured where it is (`train.speed`).
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from specserve.errors import ConfigError

_FILE = Path(__file__).parent / "targets" / "devices.json"
SHARE_OF_PEAK = 0.4  # of a data sheet: a good one for training in bfloat16
SHARE_OF_BANDWIDTH = 0.5  # of a data sheet: reached by answering many at once
SHARE_OF_MEASURED = 0.6  # of what a large product reaches here, and a read of one large matrix (docs/log)
_COUNTED = re.compile(r"(?P<id>.+)-(?P<count>[1-9]\d*)")


@dataclass(frozen=True)
class Device:
    """A device as JAX counts them. Rates are dense operations and bytes, per second; sizes are bytes."""

    id: str  # as users write it
    name: str
    kind: str  # a pattern of what JAX calls it
    peak: float  # operations in bfloat16
    peak_8bit: float  # in fp8 or int8, whichever is faster
    memory: float
    bandwidth: float  # of the memory
    link: float  # to the devices beside it (NVLink, ICI), in one direction
    linked: int  # how many devices such links join
    network: float  # to devices beyond these (a data centre's network), in one direction
    source: str
    per_chip: int = 1  # devices of one chip, as it is sold and counted
    is_measured: bool = False  # on this machine: its rates are those that a program reached

    @property
    def platform(self) -> str:
        """The platform that programs for it are made for, as JAX names it."""
        return "cpu" if self.kind == "cpu" else "tpu" if self.id.startswith("tpu") else "gpu"

    @property
    def share_of_peak(self) -> float:
        """The share of the operations that a long computation reaches."""
        return SHARE_OF_MEASURED if self.is_measured else SHARE_OF_PEAK

    @property
    def share_of_bandwidth(self) -> float:
        """The share of the memory's rate that a long computation reaches."""
        return SHARE_OF_MEASURED if self.is_measured else SHARE_OF_BANDWIDTH

    def rate_among(self, num_devices: int) -> float:
        """The bytes per second that each of so many devices sends to the others."""
        if num_devices <= self.linked:
            return self.link
        return self.network


DEVICES = tuple(Device(**row) for row in json.loads(_FILE.read_text(encoding="utf-8")))
REFERENCE = next(device for device in DEVICES if device.id == "h100")  # published heads were trained on such ones


def find_device(kind: str) -> Device | None:
    """Find the device that JAX calls `kind`; None where it is not in the table."""
    return next((device for device in DEVICES if re.search(device.kind, kind)), None)


def parse_devices(text: str) -> tuple[Device, int]:
    """Read a text such as `tpu-v6e-16`: the device, and how many of them so many chips are. Raises ConfigError."""
    names = ", ".join(device.id for device in DEVICES)
    found = _COUNTED.fullmatch(text.strip().lower())
    if found is None:
        raise ConfigError(f"--devices {text!r}: expected a name and a number of chips, such as h100-8; names: {names}")
    for device in DEVICES:
        if device.id == found["id"]:
            return device, int(found["count"]) * device.per_chip
    raise ConfigError(
        f"--devices {text}: {found['id']!r} is not in the table, expected one of {names}; figures of others go into "
        "targets/devices.json (`specserve plan devices` prints them)"
    )
