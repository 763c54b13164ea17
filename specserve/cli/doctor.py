"""`specserve doctor`: what this machine has, what is wrong with it, and the fix.

JAX and all that a broken installation may fail to import is imported within the check that needs it, so that the other
checks still report what they found.
"""

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Literal

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.markup import escape

import specserve
from specserve import host, hub

ACCELERATORS = {"/dev/nvidia0": "cuda", "/dev/accel0": "tpu", "/dev/vfio/0": "tpu"}  # device file -> extra
SHOWN = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "transformers", "wandb", "tensorboardX")
LEAST_MEMORY = 3 * 10**9  # serving the bundled target takes it while programs compile
LEAST_MAPS = 30_000  # memory maps; every compiled program takes up to 1,000


@dataclass(frozen=True)
class MachineFinding:
    """A problem. An error keeps specserve from working, or makes it wrong; a warning costs something."""

    level: Literal["error", "warning"]
    what: str
    fix: str


@dataclass
class MachineCheck:
    """The result of one check: what there is, as one line, and the problems."""

    name: str
    text: str = ""
    findings: list[MachineFinding] = field(default_factory=list)

    def warn(self, what: str, fix: str) -> None:
        self.findings.append(MachineFinding("warning", what, fix))

    def fail(self, what: str, fix: str) -> None:
        self.findings.append(MachineFinding("error", what, fix))


def doctor(
    address: Annotated[str, typer.Option("--host", help="Address that a server would listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port that a server would listen on.", min=0, max=65535)] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Print what every check found, then each finding with its fix. Errors exit with 1."""
    checks, console = [], Console(highlight=False, soft_wrap=True)
    for check in examine(address, port):
        checks.append(check)
        if not as_json:
            console.print(f"[bold]{check.name:14}[/] {escape(check.text)}")
        for found in () if as_json else check.findings:
            color = {"error": "red", "warning": "yellow"}[found.level]
            console.print(f"{'':14} [{color}]{found.level}[/] {escape(found.what)}")
            console.print(f"{'':14} fix: {escape(found.fix)}")
    levels = [found.level for check in checks for found in check.findings]
    num_errors = levels.count("error")
    if as_json:
        found = {"is_sound": not num_errors, "executable": sys.executable, "checks": [*map(asdict, checks)]}
        print(json.dumps(found, indent=2))
    else:
        console.print(f"{num_errors} errors, {levels.count('warning')} warnings")
    if num_errors:
        raise typer.Exit(1)


def examine(address: str, port: int) -> Iterator[MachineCheck]:
    """Make every check, one after another. A check that raises is itself a finding."""
    checks: Mapping[str, Callable[[MachineCheck], None]] = {
        "names": check_names,
        "versions": check_versions,
        "devices": check_devices,
        "memory": check_memory,
        "kernels": check_kernels,
        "compile cache": check_cache,
        "port": lambda check: check_port(check, address, port),
        "hub": check_hub,
    }
    for name, run in checks.items():
        check = MachineCheck(name)
        try:
            run(check)
        except Exception as error:  # a broken installation may raise anything
            check.text = "could not be checked"
            check.fail(
                f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                "repair what is named above; else run `pip install --force-reinstall specserve` in a new environment",
            )
        yield check


def check_names(check: MachineCheck) -> None:
    """Check that no file shadows a module. Python takes a module from the first place that has one of its name: the
    working directory, as `python -m` and notebooks have it, and PYTHONPATH come before what is installed. A folder
    without an __init__.py gives way to an installed package."""
    required = {canonicalize_name(each.name) for each in _required()}
    homes = {"specserve": Path(specserve.__file__).resolve().parent.parent}
    for module, distributions in metadata.packages_distributions().items():
        if required.intersection(map(canonicalize_name, distributions)):
            homes[module] = Path(str(metadata.distribution(distributions[0]).locate_file(""))).resolve()
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    for folder in dict.fromkeys(Path(folder).resolve() for folder in (".", *given)):
        for module, home in homes.items():
            spec = PathFinder.find_spec(module, [str(folder)])
            if spec and spec.origin and folder != home:
                place = Path(spec.origin)
                place = place.parent if place.name == "__init__.py" else place
                check.fail(
                    f"{place} stands before the {module} that is installed, in {home}",
                    f"rename {place}, or start from another directory and leave {folder} out of PYTHONPATH",
                )
    check.text = f"{len(check.findings)} of {len(homes)} modules are shadowed by files of other names"


def _required() -> list[Requirement]:
    """List what specserve's metadata asks for: nothing in a checkout that is not installed."""
    try:
        stated = map(Requirement, metadata.requires("specserve") or ())
    except metadata.PackageNotFoundError:
        return []
    return [each for each in stated if not each.marker or each.marker.evaluate({"extra": ""})]


def _version(distribution: str) -> str:
    """Return the installed version, or an empty string."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def check_versions(check: MachineCheck) -> None:
    """Check the versions of specserve's requirements against its metadata."""
    for each in _required():
        version = _version(each.name)
        if not version or not each.specifier.contains(version, prereleases=True):
            needed = f"{each.name}{each.specifier}"
            check.fail(f"specserve needs {needed}, and {version or 'none'} is installed", f"pip install '{needed}'")
    there = [f"{name} {version}" for name in SHOWN if (version := _version(name))]
    check.text = f"specserve {specserve.__version__}, Python {platform.python_version()}, {', '.join(there)}"


def check_devices(check: MachineCheck) -> None:
    """Check which devices JAX computes on, and that it does not leave an accelerator of this machine unused."""
    import jax

    backend, kinds = jax.default_backend(), sorted({device.device_kind for device in jax.devices()})
    check.text = f"{backend}: {len(jax.devices())} x {', '.join(kinds)}, {host.num_cores()} cores"
    wish = os.environ.get("JAX_PLATFORMS")
    for file, extra in ACCELERATORS.items():
        if backend == "cpu" and Path(file).exists():
            fix = "unset JAX_PLATFORMS" if wish else f"pip install 'specserve[{extra}]'"
            check.warn(f"{file} is an accelerator, and JAX computes on the CPU (JAX_PLATFORMS={wish or ''})", fix)


def check_memory(check: MachineCheck) -> None:
    """Check the free memory of the host and of a device, and the memory maps that compiled programs take."""
    import jax
    import psutil

    from specserve import mesh

    free, maps = host.free_memory(), host.free_memory_maps()
    check.text = f"{free / 1e9:,.1f} GB free of {psutil.virtual_memory().total / 1e9:,.1f} GB"
    if jax.default_backend() != "cpu":
        check.text += f"; {mesh.free_memory() / 1e9:,.1f} GB free on each device"
    if free < LEAST_MEMORY:
        check.warn(
            f"{free / 1e9:,.1f} GB are free; the bundled target with its programs takes {LEAST_MEMORY / 1e9:,.0f} GB",
            "end other programs, or give serve fewer --max-slots and a lower --max-model-len",
        )
    if maps is not None and maps < LEAST_MAPS and jax.default_backend() == "cpu":
        check.warn(f"this process may map only {maps:,} more pieces of memory", "sysctl vm.max_map_count=1000000")


def check_kernels(check: MachineCheck) -> None:
    """Check that the kernels of this backend are there, and compute what XLA's operations do."""
    import jax

    from specserve.kernels import check as kernels_check
    from specserve.kernels import native
    from specserve.kernels.native import build

    found = list(kernels_check.check_kernels())
    if jax.default_backend() != "cpu":
        name, fix = f"{len(found)} of Pallas", "report it, with this output"
    else:
        name = native.describe()
        fix = build.AGAIN if build.sources() and "`" not in name else name.rpartition("; ")[2]
        if not found:
            check.warn(f"no native CPU kernels ({name}): XLA's own products run, which are slower", fix)
    check.text = name
    for each in found:
        check.text += f"; {each.kernel} off XLA's by {each.share:.1%} of what rounding explains"
        if not each.is_right:
            check.fail(f"{each.kernel} differ from XLA's by {each.share:.3g} times what rounding explains", fix)


def check_cache(check: MachineCheck) -> None:
    """Check the user's folder of compiled programs and measured costs, without which every start compiles."""
    folder = host.cache_folder()
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    check.text = f"{folder}: {len(sizes)} files, {sum(sizes) / 1e6:,.0f} MB"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        check.warn(
            f"{folder} cannot be written ({error.strerror}), so every start compiles",
            "make it writable, or set XDG_CACHE_HOME to a folder that is",
        )


def check_port(check: MachineCheck, address: str, port: int) -> None:
    """Check whether a server could listen at this address."""
    from specserve.errors import ConfigError
    from specserve.serve.http.transport.server import bind_listener

    check.text = f"{address}:{port} is free"
    try:
        bind_listener(address, port).close()
    except ConfigError as error:
        check.text = f"{address}:{port} is taken"
        check.warn(str(error).partition(";")[0], f"end what listens there, or serve with --port {port + 1}")


def check_hub(check: MachineCheck) -> None:
    """Check the cache of models, and whether the hub can be reached. The bundled target and folders need neither."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    check.text = f"{hub.absence() or f'{constants.ENDPOINT} answers'}; {len([*folder.glob('models--*')])} models in "
    check.text += f"{folder}; the bundled target and folders need no hub"
