"""The origin of a result: the code, the libraries, the machine, the command, and which model it was."""

import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import specserve
from specserve.errors import CheckpointError

SAMPLE_BYTES = 1 << 16  # read at each sampled place of a weight file
NUM_SAMPLES = 16  # places per weight file, evenly spread


def collect() -> dict[str, object]:
    """A JSON-ready record for logs, exports and reports. It initialises JAX's backend, so call it after flags are
    set."""
    import jax

    devices = jax.devices()
    return {
        "specserve": specserve.__version__,
        **_git(Path(specserve.__file__).parent.parent),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "platform": platform.platform(),
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "num_processes": jax.process_count(),
        "utc_time": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": list(sys.argv),
    }


def fingerprint(path: Path) -> str:
    """16 hex digits that distinguish the model in a folder from other models.

    They cover the config, and of every safetensors file its name, size, header and evenly spread samples of its
    content: a megabyte per file, whatever its size. Of a file in GGUF, of which the config is made, they cover size and
    samples. Names of folders and times do not count. A fingerprint guards against mix-ups, not against forgery,
    because bytes between the samples are not read. Raises CheckpointError.
    """
    config = path / "config.json"
    weights = sorted(path.glob("*.safetensors"))
    is_gguf = not weights
    if is_gguf:
        weights = sorted(path.glob("*.gguf"))
    if not config.is_file() or not weights:
        raise CheckpointError(f"{path}: expected a model folder with config.json and *.safetensors")
    digest = hashlib.sha256()
    try:
        # The same settings in another order or layout are the same model.
        if not is_gguf:
            digest.update(json.dumps(json.loads(config.read_bytes()), sort_keys=True).encode())
        for file in weights:
            digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
            _update_with_samples(digest, file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot fingerprint the model: {error}") from error
    return digest.hexdigest()[:16]


def _update_with_samples(digest: "hashlib._Hash", file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        num_header = 0
        if file.suffix == ".safetensors":
            num_header = min(int.from_bytes(stream.read(8), "little"), size)  # the length is the file's own claim
        while num_header > 0 and (chunk := stream.read(min(num_header, SAMPLE_BYTES))):
            digest.update(chunk)
            num_header -= len(chunk)
        begin = stream.tell()
        for i in range(NUM_SAMPLES):
            stream.seek(begin + max(0, size - begin - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))


def _git(folder: Path) -> dict[str, object]:
    """The commit and the dirty flag when the package runs from its own checkout, else nothing."""
    if not (folder / ".git").exists():  # installed, perhaps inside somebody else's repository
        return {}
    commit, status = _run_git(folder, "rev-parse", "HEAD"), _run_git(folder, "status", "--porcelain")
    if commit is None or status is None:
        return {}
    return {"git_commit": commit, "git_is_dirty": bool(status)}


def _run_git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, no commit yet, not our repository
        return None
    return done.stdout.strip()
