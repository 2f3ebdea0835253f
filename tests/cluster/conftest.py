"""Ray in the tests' own process."""

from collections.abc import Iterator

import pytest

from maxsimd.api.cluster.ray_session import ray_session


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Ray with two cores, in a folder of its own, until the module's tests are done."""
    pytest.importorskip("ray")
    with ray_session(None, num_cpus=2):
        yield
