"""The checks of `specserve doctor`: what this machine has and what is wrong with it.

JAX and all that a broken installation may fail to import is imported within the check that needs it, so that the other
checks still say what they found.
"""

import os
import platform
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

import specserve
from specserve import host, hub

Level = Literal["error", "warning"]

# The names that distributions are imported by: all that pyproject.toml requires, which a test holds, and others' own.
REQUIRED = {
    "jax": "jax",
    "jaxlib": "jaxlib",
    "numpy": "numpy",
    "optax": "optax",
    "orbax-checkpoint": "orbax",
    "datasets": "datasets",
    "pyarrow": "pyarrow",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "transformers": "transformers",
    "jinja2": "jinja2",
    "huggingface_hub": "huggingface_hub",
    "httpx": "httpx",  # by which servers and the hub are asked
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "llguidance": "llguidance",
    "pydantic": "pydantic",
    "typer": "typer",
    "rich": "rich",
    "pyyaml": "yaml",
    "prometheus-client": "prometheus_client",
    "flatbuffers": "flatbuffers",
    "packaging": "packaging",
    "psutil": "psutil",
}
EXTRAS = {
    "wandb": "wandb",
    "tensorboard": "tensorboardX",
    "otlp": "opentelemetry-exporter-otlp-proto-http",
    "cuda": "jax-cuda13-plugin",
    "cuda12": "jax-cuda12-plugin",
    "tpu": "libtpu",
}
ACCELERATORS = {"/dev/nvidia0": "cuda", "/dev/accel0": "tpu", "/dev/vfio/0": "tpu"}  # device file -> extra
LEAST_MEMORY = 3 * 10**9  # that serving the bundled target takes while its programs are compiled
REPLY_SECONDS = 3.0


@dataclass(frozen=True)
class MachineFinding:
    """A problem that a check has found. An error keeps specserve from working, or makes it wrong; a warning costs
    something."""

    level: Level
    what: str
    fix: str


@dataclass
class MachineCheck:
    """The result of one check: facts as one line and as JSON, and the problems."""

    name: str
    text: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[MachineFinding] = field(default_factory=list)

    def warn(self, what: str, fix: str) -> None:
        self.findings.append(MachineFinding("warning", what, fix))

    def fail(self, what: str, fix: str) -> None:
        self.findings.append(MachineFinding("error", what, fix))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine(address: tuple[str, int]) -> Iterator[MachineCheck]:
    """Make every check, one after another. `address` is the host and the port that a server would listen on. A check
    that raises is itself a finding."""
    checks: dict[str, Callable[[MachineCheck], None]] = {
        "names": check_names,
        "versions": check_versions,
        "devices": check_devices,
        "memory": check_memory,
        "kernels": check_kernels,
        "compile cache": check_cache,
        "port": lambda check: check_port(check, *address),
        "hub": check_hub,
    }
    for name, run in checks.items():
        check = MachineCheck(name)
        try:
            run(check)
        except Exception as error:  # whatever a broken installation raises
            check.text = "could not be checked"
            check.fail(
                f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                "mend what is said above; else run `pip install --force-reinstall specserve` in a new environment",
            )
        yield check


def check_names(check: MachineCheck) -> None:
    """Check that no file shadows a module. Python takes a module from the first place that has one of its name: the
    working directory, as `python -m` and notebooks have it, and PYTHONPATH come before what is installed."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = list(dict.fromkeys(Path(folder).resolve() for folder in (".", *filter(None, given))))
    for folder in folders:
        for name, place in shadowing(folder):
            check.fail(
                f"{place} stands before the {name} that is installed, in {_where(name)}",
                f"rename {place}, or start from another directory and leave {folder} out of PYTHONPATH",
            )
    check.facts = {"folders": [str(folder) for folder in folders]}
    number = len({finding.what for finding in check.findings})
    check.text = f"{number} shadowed" if number else "nothing stands before specserve or what it imports"


def shadowing(folder: Path) -> Iterator[tuple[str, Path]]:
    """List the modules in a folder that have the name of specserve or of what it imports, and are not the installed
    ones. A folder without an __init__.py gives way to an installed package, so it is not listed."""
    distributions = {module: name for name, module in REQUIRED.items()}
    for name in ("specserve", *distributions):
        spec = PathFinder.find_spec(name, [str(folder)])
        if spec is None or spec.origin is None or folder == _home(name, distributions.get(name, "")):
            continue
        place = Path(spec.origin)
        yield name, place.parent if place.name == "__init__.py" else place


def _home(name: str, distribution: str) -> Path | None:
    """Return the folder that a module is installed in."""
    if name == "specserve":
        return Path(specserve.__file__).resolve().parent.parent
    try:
        return Path(str(metadata.distribution(distribution).locate_file(""))).resolve()
    except metadata.PackageNotFoundError:
        return None


def _where(name: str) -> str:
    distributions = {module: distribution for distribution, module in REQUIRED.items()}
    return str(_home(name, distributions.get(name, "")) or "no place: it is not installed")


def check_versions(check: MachineCheck) -> None:
    """Check the versions of Python, of specserve and of its requirements against what specserve's metadata asks
    for."""
    from packaging.requirements import Requirement

    found = {name: _version(name) for name in REQUIRED}
    extras = {name: _version(distribution) for name, distribution in EXTRAS.items()}
    try:
        stated = [Requirement(text) for text in metadata.requires("specserve") or ()]
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        stated = []
    for requirement in stated:
        version = _version(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            check.fail(
                f"specserve needs {requirement.name}{requirement.specifier}, and {version or 'none'} is installed",
                f"pip install '{requirement.name}{requirement.specifier}'",
            )
    if not stated:
        for name in (name for name, version in found.items() if version is None):
            check.fail(f"{name} is not installed", f"pip install {name}")
    check.facts = {
        "specserve": specserve.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "required": found,
        "extras": extras,
    }
    present = ", ".join(name for name, version in extras.items() if version) or "none"
    check.text = (
        f"specserve {specserve.__version__}, Python {platform.python_version()}, jax {found['jax']}, jaxlib "
        f"{found['jaxlib']}; extras: {present}"
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_devices(check: MachineCheck) -> None:
    """Check which devices JAX computes on, and that it does not leave an accelerator of this machine unused."""
    import jax

    devices = jax.devices()
    backend = jax.default_backend()
    kinds = sorted({device.device_kind for device in devices})
    check.facts = {"backend": backend, "kinds": kinds, "num_devices": len(devices), "num_cores": host.num_cores()}
    what = f"{len(devices)} x {', '.join(kinds)}" if backend != "cpu" else f"{_processor()}, {host.num_cores()} cores"
    check.text = f"{backend}: {what}"
    for file, extra in ACCELERATORS.items():
        if backend == "cpu" and Path(file).exists():
            wish = os.environ.get("JAX_PLATFORMS")
            check.warn(
                f"{file} is an accelerator, and JAX computes on the CPU" + (f": JAX_PLATFORMS={wish}" if wish else ""),
                "unset JAX_PLATFORMS" if wish else f"pip install 'specserve[{extra}]'",
            )


def _processor() -> str:
    for line in host.processor().split("; "):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def check_memory(check: MachineCheck) -> None:
    """Check the free memory of the host and of a device, and the memory maps that compiled programs take."""
    import jax
    import psutil

    from specserve import mesh

    free, total, maps = host.free_memory(), psutil.virtual_memory().total, host.free_memory_maps()
    check.facts = {"free_bytes": free, "total_bytes": total, "free_memory_maps": maps}
    check.text = f"{free / 1e9:,.1f} GB free of {total / 1e9:,.1f} GB"
    if jax.default_backend() != "cpu":
        check.facts["device_free_bytes"] = mesh.free_memory()
        check.text += f"; {check.facts['device_free_bytes'] / 1e9:,.1f} GB free on each device"
    if free < LEAST_MEMORY:
        check.warn(
            f"{free / 1e9:,.1f} GB are free; the bundled target with its programs takes {LEAST_MEMORY / 1e9:,.0f} GB",
            "end other programs, or give serve fewer --max-slots and a lower --max-model-len",
        )
    if maps is not None and maps < 30_000 and jax.default_backend() == "cpu":
        check.warn(
            f"this process may map only {maps:,} more pieces of memory, and every compiled program takes up to 1,000",
            "sysctl vm.max_map_count=1000000",
        )


def check_kernels(check: MachineCheck) -> None:
    """Check that the kernels of this backend are there, and compute what XLA's operations do."""
    import jax

    from specserve.kernels import check as kernels_check
    from specserve.kernels import native

    is_cpu = jax.default_backend() == "cpu"
    found = list(kernels_check.check_kernels())
    check.facts = {"native": native.describe() if is_cpu else None, "checked": [asdict(each) for each in found]}
    if is_cpu and not found:
        check.text = "no native kernels: XLA's own products run, which are slower"
        check.warn(f"native CPU kernels: {native.describe()}", _kernels_fix(native.describe()))
        return
    if not found:
        check.text = f"no kernels of ours for {jax.default_backend()}: XLA's operations run"
        return
    wrong = [each for each in found if not each.is_right]
    name = f"native, {native.describe()}" if is_cpu else "Pallas"
    for each in wrong:
        check.fail(
            f"{name}: {each.kernel} differ from XLA's by {each.share:.3g} times what rounding explains",
            "build them again: python -m specserve.kernels.native build" if is_cpu else "report it, with this output",
        )
    largest = max(each.share for each in found)
    kernels = ", ".join(each.kernel for each in found)
    check.text = f"{name}: {kernels}; off XLA's by {largest:.1%} of what rounding explains"
    if wrong:
        check.text = f"{name}: {', '.join(each.kernel for each in wrong)} are wrong"


def _kernels_fix(reason: str) -> str:
    from specserve.kernels.native import build

    has_sources = build.sources(build.FOLDER)
    return build.AGAIN if has_sources and "`" not in reason else reason.rpartition("; ")[2]


def check_cache(check: MachineCheck) -> None:
    """Check the user's folder of compiled programs and measured costs, without which every start compiles."""
    folder = host.cache_folder()
    sizes = {
        room.name: sum(path.stat().st_size for path in room.rglob("*") if path.is_file())
        for room in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if room.is_dir()
    }
    programs = folder / "programs"
    number = len(list(programs.iterdir())) if programs.is_dir() else 0
    is_writable, reason = _is_writable(folder)
    check.facts = {"folder": str(folder), "num_programs": number, "bytes": sizes, "is_writable": is_writable}
    check.text = f"{folder}: {number} programs, {sum(sizes.values()) / 1e6:,.0f} MB in all"
    if not is_writable:
        check.warn(
            f"{folder} cannot be written ({reason}), so every start compiles",
            "make it writable, or set XDG_CACHE_HOME to a folder that is",
        )


def _is_writable(folder: Path) -> tuple[bool, str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"specserve")
    except OSError as error:
        return False, error.strerror or str(error)
    return True, ""


def check_port(check: MachineCheck, name: str, port: int) -> None:
    """Check whether a server could listen at this address."""
    from specserve.errors import ConfigError
    from specserve.serve.http.transport.server import bind_listener

    check.facts = {"host": name, "port": port, "is_free": True}
    check.text = f"{name}:{port} is free"
    try:
        bind_listener(name, port).close()
    except ConfigError as error:
        check.facts["is_free"] = False
        check.text = f"{name}:{port} is taken"
        who = _who_answers(name, port)
        check.warn(f"{str(error).partition(';')[0]}{who}", f"end what listens there, or serve with --port {port + 1}")


def _who_answers(name: str, port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://{name}:{port}/version", timeout=REPLY_SECONDS) as reply:
            return f"; it answers /version with {reply.read(200).decode(errors='replace')}"
    except (OSError, ValueError, urllib.error.URLError):
        return ""


def check_hub(check: MachineCheck) -> None:
    """Check the cache of models, and whether the hub can be reached. Neither is needed for the bundled target or for
    folders."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    models = sorted(path.name.removeprefix("models--").replace("--", "/") for path in folder.glob("models--*"))
    reason = hub.absence()
    check.facts = {"cache": str(folder), "models": models, "endpoint": constants.ENDPOINT, "unreachable": reason}
    check.text = f"{reason or f'{constants.ENDPOINT} answers'}; {len(models)} models in {folder}"
    if reason:
        check.text += "; the bundled target and folders need no hub"


def summary(checks: Sequence[MachineCheck]) -> dict[str, Any]:
    """Return all findings as JSON."""
    return {
        "is_sound": not any(finding.level == "error" for check in checks for finding in check.findings),
        "executable": sys.executable,
        "checks": [check.to_json() for check in checks],
    }
