"""Run every check and figure that waits for a TPU, the cheapest first: what to do with the first 45 minutes on a v5e, a
v6e, or a host of four or eight of them.

    python tools/first_tpu.py                                       # all stages, on one chip of 32 GB
    python tools/first_tpu.py --preset qwen3-4b --max-model-len 1024   # on one of 16 GB
    python tools/first_tpu.py --mesh tensor=8                       # on all chips of a host
    python tools/first_tpu.py --target ./smollm2                    # also trains a head for that model, and serves it

`first_device.py` says how stages run.
"""

import sys

from first_device import ATTENTION, ENTRIES, SMALL_TARGET, Command, Models, Stages, checks, main, training

PAGES = (128, 64, 256)  # tokens; the first is what a server takes


def stages(models: Models) -> Stages:
    """The stages by name, in the order in which they run."""
    products = ("--rows", "1,8,64", "--target", models.preset)
    no_products = ("--rows", "")
    return {
        **checks("tpu", "tpu"),
        "steps": [
            SMALL_TARGET,
            Command("as they are", models.ways, 420),
            Command("single steps", (*models.ways, "--burst", "1"), 420),
            Command("batches from 1", (*models.ways, "--least-batch", "1"), 420),
            *[Command(f"pages of {size}", (*models.ways, "--page-size", str(size)), 420) for size in PAGES[1:]],
        ],
        "attention": [
            Command(
                f"attention, pages of {size}",
                (*ATTENTION, "--page-size", str(size), *ENTRIES, *(no_products if i else products)),
                300,
            )
            for i, size in enumerate(PAGES)
        ],
        **training(models),
    }


if __name__ == "__main__":
    sys.exit(main("first_tpu", __doc__ or "", "tpu", stages))
