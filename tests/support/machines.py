"""A machine that is not in the table of devices, as it would be measured."""

from specserve.devices import Device

LAPTOP = Device(
    id="here",
    name="a laptop",
    kind="cpu",
    peak=1e11,
    peak_8bit=1e11,
    memory=16e9,
    bandwidth=2e10,
    link=1.0,
    linked=1,
    network=1.0,
    source="",
    is_measured=True,
)
