"""Ray on one core of this machine, as a run starts it and ends it: nothing of it is left."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from agentrl.cluster.cluster import ray_session
from agentrl.config.cluster import ClusterConfig


@contextmanager
def local_ray(*files: str) -> Iterator[None]:
    """Start it for the block. files: `__name__` of test files whose classes actors need: these cannot import
    them, and get them by value.
    """
    modules = [sys.modules[name] for name in files]
    with ray_session(ClusterConfig(num_cpus=1)):
        for module in modules:
            ray.cloudpickle.register_pickle_by_value(module)
        yield
        for module in modules:
            ray.cloudpickle.unregister_pickle_by_value(module)
