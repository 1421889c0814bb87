"""Settings shared by all tests: deterministic property tests, seeded randomness, one thread per worker."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# The same examples on every run and every machine: a failure in CI is a failure at home.
settings.register_profile(
    "coflash",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# For hunting: `pytest --hypothesis-profile=explore` draws new examples each time.
settings.register_profile("explore", parent=settings.get_profile("coflash"), derandomize=False)
settings.load_profile("coflash")


def pytest_configure(config: pytest.Config) -> None:
    # No test may reach a model hub: whatever it loads, it makes or a package ships.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Tests that import torch start from the same random state, in whatever order they run."""
    import sys

    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _one_thread_per_worker() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)
