"""The tiny pair as a server loads it."""

import pytest

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.serve.launch import Models


@pytest.fixture
def models(tiny_target: Target, tiny_head: Head) -> Models:
    return Models("tiny", tiny_target, tiny_head, None)


@pytest.fixture
def headless(tiny_target: Target) -> Models:
    return Models("tiny", tiny_target, None, None)
