"""What comes out of trio is what was raised in it."""

import pytest
import trio

from agentrl.errors import ServerError
from agentrl.servers.trio_run import in_trio


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
