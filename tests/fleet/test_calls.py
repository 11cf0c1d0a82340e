"""What comes out of trio, and out of an actor, is what was raised in it."""

import pytest
import ray
import trio

from agentrl.config.cluster import ClusterConfig
from agentrl.errors import InfrastructureError, ServerError
from agentrl.fleet.calls import get, in_trio
from agentrl.fleet.cluster import ray_session


def raising(error: BaseException):
    async def fail() -> None:
        raise error

    async def nested() -> None:
        async with trio.open_nursery() as outer, trio.open_nursery() as inner:
            outer.start_soon(trio.sleep_forever)
            inner.start_soon(fail)

    return nested


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ServerError("gone")])
def test_the_cause_is_unwrapped(error):
    with pytest.raises(type(error)) as caught:
        in_trio(raising(error))
    assert caught.value is error


def test_a_bug_stays_what_it_is():
    with pytest.raises(ExceptionGroup) as caught:
        in_trio(raising(ZeroDivisionError()))
    assert caught.group_contains(ZeroDivisionError)


def test_a_value_is_returned():
    async def double(number: int) -> int:
        return 2 * number

    assert in_trio(double, 21) == 42


@ray.remote(num_cpus=0)
class Unmakable:
    def __init__(self) -> None:
        raise AttributeError("nothing is so called")

    def wait(self) -> None: ...


def test_what_a_constructor_raised_is_told():
    with ray_session(ClusterConfig()), pytest.raises(InfrastructureError, match=r"an actor could not be made: .*nothing is so called"):
        get(Unmakable.remote().wait.remote(), timeout_s=120, who="an actor")
