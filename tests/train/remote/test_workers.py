"""What is decided before Ray is asked for anything, and needs no Ray."""

from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny_run

from specserve.errors import ConfigError
from specserve.train.remote.workers import fit
from specserve.train.run.checks import check_settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ray": True, "coordinator": "auto"}, "--ray starts the processes of a run itself"),
        ({"ray": True, "num_processes": 2}, "--ray starts the processes of a run itself"),
        ({"num_workers": 2}, "give --ray too"),
        ({"ray_address": "auto"}, "give --ray too"),
        ({"ray": True, "budget": "1h"}, "--budget and --regenerate are for one process"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(tiny_run(tmp_path, **changes))


def test_devices_are_shared_evenly(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 devices, which 3 workers do not share evenly"):
        fit(tiny_run(tmp_path, ray=True, num_workers=3, mesh="data=2"), lambda _run, _listen: None)
