"""Signals held back: they wait, they are not lost, and everything is as before afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from npu.interrupts import ENDING, deliver_signals, held_signals

steps: list[str] = []


@pytest.fixture(autouse=True)
def _handlers_stay_as_they_were() -> Iterator[None]:
    steps.clear()
    before = [signal.getsignal(number) for number in ENDING]
    yield
    assert [signal.getsignal(number) for number in ENDING] == before


@held_signals()
def inner() -> None:
    signal.raise_signal(signal.SIGINT)
    steps.append("inner")


@held_signals()
def outer() -> None:
    inner()
    steps.append("outer")


@held_signals()
def failing() -> None:
    signal.raise_signal(signal.SIGINT)
    raise ZeroDivisionError


def test_ctrl_c_waits_for_the_end_of_the_block() -> None:
    with pytest.raises(KeyboardInterrupt):
        inner()
    assert steps == ["inner"]


def test_an_inner_block_leaves_it_to_the_outer_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        outer()
    assert steps == ["inner", "outer"]


def test_ctrl_c_comes_where_it_is_asked_for_and_only_once() -> None:
    with held_signals():
        deliver_signals()  # nothing has come yet
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            deliver_signals()
        deliver_signals()


def test_an_error_in_the_block_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        failing()
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_every_signal_that_came_is_delivered_in_order() -> None:
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in ENDING}
    sent = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTERM]
    try:
        with held_signals():
            for number in sent:
                signal.raise_signal(number)
            assert came == []
        assert came == sent
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_signals():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_let_through() -> None:
    """Python handles signals in the main thread alone; elsewhere not even a handler can be set."""

    def work() -> None:
        with held_signals():
            deliver_signals()
            steps.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert steps == ["done"]
