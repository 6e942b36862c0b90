"""Set-up that all tests share."""

import pytest
import torch

from baselines import BASELINES
from epikv import POLICIES


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """A second thread gains these small models nothing, and on a busy machine costs much."""
    torch.set_num_threads(1)


@pytest.fixture
def registered(monkeypatch):
    """Make the baselines policies like any other, for one test."""
    for name, policy in BASELINES.items():
        monkeypatch.setitem(POLICIES, name, policy)
