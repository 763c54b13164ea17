"""Builds the native CPU kernels while pip builds or installs; see specserve/kernels/native/build.py.

An editable installation gets the library in the source tree, a wheel carries it and with it the name of the platform.
Where it cannot be built the installation goes on: the wheel stays py3-none-any, and a text file says why.
"""

import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging import tags

NATIVE = Path("specserve/kernels/native")


class NativeKernels(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root) / NATIVE
        build = _load(folder / "build.py")
        self.scratch = None if version == "editable" else Path(tempfile.mkdtemp())
        into = self.scratch or folder
        reason = build.build_or_say(folder, into)
        if reason is not None:
            self.app.display_warning(f"native CPU kernels are not built: {reason}")
        if version == "editable":
            return
        name = build.MARKER if reason is not None else build.LIBRARY
        build_data["force_include"][str(into / name)] = str(NATIVE / name)
        if reason is None:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if self.scratch is not None:
            shutil.rmtree(self.scratch)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _platform() -> str:
    """The wheel's platform. Python's own may be wider than what was built, where it runs on two kinds of Macs."""
    if sys.platform != "darwin":
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")
    oldest = os.environ.get("MACOSX_DEPLOYMENT_TARGET", platform.mac_ver()[0]).split(".")
    version = (int(oldest[0]), int(oldest[1]) if len(oldest) > 1 else 0)
    return next(tags.mac_platforms(version, platform.machine()))
