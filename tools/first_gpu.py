"""Run every check and figure that waits for an NVIDIA GPU, the cheapest first: what to do with the first 45 minutes on
one.

    python tools/first_gpu.py                                 # all stages
    python tools/first_gpu.py --stages versions,kernels
    python tools/first_gpu.py --target ./smollm2              # also trains a head for that model, and serves it

`first_device.py` says how stages run.
"""

import sys

from first_device import ATTENTION, ENTRIES, SMALL_TARGET, Command, Models, Stages, checks, main, training

IN_GRAPHS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+WHILE"}  # loops too
# of the laws: what is fastest decides nothing there, and no process may take the whole memory
SIDE_BY_SIDE = {"XLA_FLAGS": "--xla_gpu_autotune_level=0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
TFRT = {"XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1"}


def stages(models: Models) -> Stages:
    """The stages by name, in the order in which they run."""
    products = ("--rows", "1,8,64", "--target", models.preset)
    return {
        **checks("gpu", "gpu", 8, SIDE_BY_SIDE),
        "steps": [
            SMALL_TARGET,
            Command("as they are", models.ways, 420),
            Command("batches from 1", (*models.ways, "--least-batch", "1"), 420),
            Command("loops in graphs, bursts of 8", (*models.ways, "--burst", "8"), 420, IN_GRAPHS),
            Command("the TFRT client", models.ways, 420, TFRT),
        ],
        "attention": [
            Command("attention and products", (*ATTENTION, "--page-size", "32", *ENTRIES, *products), 420),
        ],
        **training(models),
    }


if __name__ == "__main__":
    sys.exit(main("first_gpu", __doc__ or "", "cuda", stages))
