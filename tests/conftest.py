from collections.abc import Iterator

import pytest
import torch

pytest_plugins = ["lightning_vdp.testing.plugin"]
# forked ranks inherit this process: threads of its own would be missing in them
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _leave_environment_as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context():
        yield
