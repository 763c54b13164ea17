"""`setup` configures our logger once and nobody else's."""

import logging

import pytest

from specserve import log
from specserve.errors import ConfigError


@pytest.fixture
def ours():
    root_handlers = logging.root.handlers[:]
    yield logging.getLogger("specserve")  # as before the test in the end, and not set up: conftest sees to both
    logging.root.handlers[:] = root_handlers


def test_setup_prints_each_line_once_to_stderr(ours, capfd):
    root = logging.getLogger()
    root.addHandler(logging.StreamHandler())  # as some library might do
    before = (root.handlers[:], root.level)
    for level in ("debug", "info"):
        log.setup(level)
    assert (root.handlers[:], root.level) == before
    logging.getLogger("specserve.some.room").info("begun")
    logging.getLogger("specserve.some.room").debug("hidden")
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("begun") == err.count("INFO specserve.some.room: begun") == 1
    assert "hidden" not in err
    with pytest.raises(ConfigError, match="debug, info, warning, error"):
        log.setup("loud")


def test_the_hub_s_client_which_has_a_handler_is_not_printed_by_the_root_s_too(ours, capfd):
    logging.getLogger("huggingface_hub").handlers[:] = [logging.StreamHandler()]
    logging.getLogger().addHandler(logging.StreamHandler())  # as some library might do
    log.setup()
    logging.getLogger("huggingface_hub.utils").warning("retrying")
    assert capfd.readouterr().err.count("retrying") == 1
