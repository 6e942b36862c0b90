"""Set-up that all tests share."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """A second thread gains these small models nothing, and on a busy machine costs much."""
    torch.set_num_threads(1)
