from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from hostcache import BlockPool, Namespace, PrefixCache
from hostcache.errors import OutOfBlocks, UsageError

HOME = Namespace("model")
OTHER = Namespace("model", prompt_version="2")


def ids(text: str) -> NDArray[np.int32]:
    return np.array([ord(character) for character in text], dtype=np.int32)


class Pins4:
    """A prefix cache over blocks of four tokens, and a clock that goes when it is told to."""

    def __init__(self, total: int = 8, max_pinned: int | None = None) -> None:
        self.now = 0.0
        self.pool = BlockPool(total, 4)
        self.cache = PrefixCache(self.pool, max_pinned=max_pinned, clock=lambda: self.now)

    def compute(self, text: str, namespace: Namespace = HOME) -> list[int]:
        """Compute a text as far as it is not known, publish it, end the sequence; returns its blocks."""
        hit = self.cache.match(namespace, ids(text + "!"))
        if hit.partial >= 0:
            self.pool.release(hit.partial)
        blocks = hit.blocks + self.pool.allocate(-(-len(text) // 4) - len(hit.blocks))
        node = hit.node
        for index in range(len(hit.blocks), len(blocks)):
            node = self.cache.publish(node, ids(text)[4 * index : 4 * index + 4], blocks[index])
        self.pool.release_all(blocks)
        self.cache.release_node(node)
        return blocks

    def fill(self) -> None:
        """Somebody needs every block that can be had, for a moment."""
        self.pool.release_all(self.pool.allocate(self.pool.available))

    def known(self, text: str, namespace: Namespace = HOME) -> int:
        return self.cache.known_tokens(namespace, ids(text))

    def check(self) -> None:
        self.pool.check()
        self.cache.check()
        assert self.pool.used == self.cache.pinned == len(self.cache.pinned_blocks())


def test_pinned_blocks_are_never_evicted() -> None:
    home = Pins4()
    blocks = home.compute("abcdefghij")
    home.compute("WXYZ")
    assert home.cache.pin(HOME, ids("abcdefghij"), "console", 60) == 8  # full blocks
    assert home.cache.pinned_blocks() == set(blocks[:2])
    home.check()
    home.fill()
    assert (home.known("abcdefghij"), home.known("WXYZ")) == (8, 0)
    assert home.pool.available == 8 - 2
    with pytest.raises(OutOfBlocks, match=r"7 blocks asked for, 6 available \(6 free, 0 cached, 0 fenced, 2 used"):
        home.pool.allocate(7)


def test_a_pin_ends_by_the_clock() -> None:
    home = Pins4()
    home.compute("abcdefgh")
    home.compute("WXYZ")
    home.cache.pin(HOME, ids("abcdefgh"), "console", 60)
    home.cache.pin(HOME, ids("WXYZ"), "console", 90)
    home.now = 59.9
    assert home.cache.expire_pins() == 0
    home.now = 60
    assert home.cache.expire_pins() == 1
    assert home.cache.pinned == 1
    assert home.known("abcdefgh") == 8  # it is evicted when the blocks are needed, not before
    home.check()
    home.fill()
    assert (home.known("abcdefgh"), home.known("WXYZ")) == (0, 4)
    home.now = 90
    home.cache.match(HOME, ids("q"))  # whoever looks something up ends it, too
    assert home.cache.pinned == 0


def test_the_tail_of_an_ended_pin_goes_before_its_head() -> None:
    home = Pins4(total=3, max_pinned=2)
    head, tail = home.compute("abcdefgh")
    home.cache.pin(HOME, ids("abcdefgh"), "console", 1)
    assert home.cache.unpin("console") == 1
    home.pool.allocate(2)
    assert [home.pool.is_cached(block) for block in (head, tail)] == [True, False]


def test_an_owner_ends_its_own_pins_only() -> None:
    home = Pins4()
    home.compute("abcdefgh")
    for owner in ("left", "right"):
        assert home.cache.pin(HOME, ids("abcdefgh"), owner, 60) == 8
    home.cache.pin(HOME, ids("abcd"), "left", 60)
    assert home.cache.pinned == 2  # blocks, each counted once
    home.check()
    assert home.cache.unpin("left") == 2
    assert home.cache.pinned == 2
    home.check()
    assert home.cache.unpin("right") == 1
    assert home.cache.unpin("right") == 0
    assert home.cache.pinned == 0
    home.check()


def test_pinning_again_renews_and_takes_in_what_was_computed_meanwhile() -> None:
    home = Pins4()
    assert home.cache.pin(HOME, ids("abcdefgh"), "console", 60) == 0  # nothing is there
    home.compute("abcd")
    assert home.cache.pin(HOME, ids("abcdefgh"), "console", 60) == 4
    home.compute("abcdefgh")
    home.now = 50
    assert home.cache.pin(HOME, ids("abcdefgh"), "console", 60) == 8
    home.now = 100
    assert home.cache.expire_pins() == 0
    assert home.cache.pinned == 2
    home.check()
    home.now = 110
    assert home.cache.expire_pins() == 1
    assert home.cache.pinned == 0
    home.check()


def test_the_cap_is_kept_and_a_refusal_changes_nothing() -> None:
    home = Pins4(total=8, max_pinned=3)
    home.compute("abcdefgh")
    home.compute("IJKLMNOP")
    home.cache.pin(HOME, ids("abcdefgh"), "left", 60)
    with pytest.raises(UsageError, match=r"'right' cannot pin 2 blocks: 2 of the 3 that may be pinned are pinned"):
        home.cache.pin(HOME, ids("IJKLMNOP"), "right", 60)
    assert home.cache.pinned == 2
    assert home.cache.pin(HOME, ids("IJKL"), "right", 60) == 4
    assert home.cache.pin(HOME, ids("abcdefgh"), "right", 60) == 8  # pinned already: no more blocks
    home.check()
    assert Pins4(total=9).cache._pins._room.most == 4  # half by default: the rest is everybody's


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_pin_lasts_some_time(seconds: float) -> None:
    home = Pins4()
    home.compute("abcd")
    with pytest.raises(UsageError, match="a pin lasts a positive number of seconds"):
        home.cache.pin(HOME, ids("abcd"), "console", seconds)
    assert home.cache.pinned == 0


def test_invalidation_ends_the_pins_of_its_version() -> None:
    """New requests never hit the old version; its pinned blocks are everybody's again; others keep their pins."""
    home = Pins4()
    home.compute("abcdefgh", HOME)
    home.compute("abcdefgh", OTHER)
    for namespace in (HOME, OTHER):
        home.cache.pin(namespace, ids("abcdefgh"), "console", 60)
    running = home.cache.match(OTHER, ids("abcdefgh!"))
    assert home.cache.invalidate(prompt_version="2") == 2
    assert home.known("abcdefgh", OTHER) == 0
    assert home.cache.pin(OTHER, ids("abcdefgh"), "console", 60) == 0
    assert home.known("abcdefgh", HOME) == 8
    assert home.cache.pinned == 2
    assert [home.pool.refs[block] for block in running.blocks] == [1, 1]  # the sequence that runs on
    home.pool.release_all(running.blocks)
    home.cache.release_node(running.node)
    home.check()
    assert home.cache.unpin("console") == 1
    home.check()


def test_whoever_keeps_copies_elsewhere_is_told_of_invalidations() -> None:
    home = Pins4()
    told: list[tuple[Namespace | None, str | None]] = []
    home.cache.on_invalidate = lambda namespace, version: told.append((namespace, version))
    home.cache.invalidate(prompt_version="2")  # although nothing of it is here
    home.cache.invalidate(namespace=HOME)
    home.cache.invalidate()
    assert told == [(None, "2"), (HOME, None), (None, None)]


def test_pins_of_unknown_namespaces_leave_no_trace() -> None:
    home = Pins4()
    for tenant in range(100):
        assert home.cache.pin(Namespace("model", salt=str(tenant)), ids("abcd"), "console", 60) == 0
    assert home.cache.nodes == 0
    with pytest.raises(UsageError, match="tokens must be int32"):
        home.cache.pin(HOME, np.zeros(4, np.int64), "console", 60)


TEXTS = ("aaaabbbb", "aaaacccc", "aaaabbbbdddd", "eeee")


class PinsAgainstModel(RuleBasedStateMachine):
    """Pins, their ends, invalidations and evictions, against a set of pins that are noted down."""

    @initialize()
    def start(self) -> None:
        self.home = Pins4(total=8, max_pinned=5)
        self.pins: dict[tuple[str, Namespace, str], tuple[int, float]] = {}  # blocks, end

    @rule(text=st.sampled_from(TEXTS), namespace=st.sampled_from((HOME, OTHER)))
    def compute(self, text: str, namespace: Namespace) -> None:
        try:
            self.home.compute(text, namespace)
        except OutOfBlocks:  # what is pinned is not had by others; a hit that was taken first goes back
            pytest.fail("5 of 8 blocks may be pinned, and 3 hold every text")

    @rule(
        text=st.sampled_from(TEXTS),
        namespace=st.sampled_from((HOME, OTHER)),
        owner=st.sampled_from("lr"),
        seconds=st.integers(1, 9),
    )
    def pin(self, text: str, namespace: Namespace, owner: str, seconds: int) -> None:
        known = self.home.known(text, namespace)
        others = {
            part for (_, space, name), (blocks, _) in self.pins.items() for part in self.parts(space, name, blocks)
        }
        fits = len(others | self.parts(namespace, text, known // 4)) <= 5
        try:
            assert self.home.cache.pin(namespace, ids(text), owner, seconds) == known
        except UsageError:
            assert not fits
            return
        assert fits
        if known:
            self.pins[owner, namespace, text] = (known // 4, self.home.now + seconds)

    @rule(owner=st.sampled_from("lr"))
    def unpin(self, owner: str) -> None:
        mine = [name for name in self.pins if name[0] == owner]
        assert self.home.cache.unpin(owner) == len(mine)
        for name in mine:
            del self.pins[name]

    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds: int) -> None:
        self.home.now += seconds
        over = [name for name, (_, end) in self.pins.items() if end <= self.home.now]
        assert self.home.cache.expire_pins() == len(over)
        for name in over:
            del self.pins[name]

    @rule(namespace=st.sampled_from((HOME, OTHER)))
    def invalidate(self, namespace: Namespace) -> None:
        self.home.cache.invalidate(namespace=namespace)
        self.pins = {name: pin for name, pin in self.pins.items() if name[1] != namespace}

    @precondition(lambda self: hasattr(self, "home"))
    @rule()
    def fill(self) -> None:
        self.home.fill()

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        if not hasattr(self, "home"):
            return
        self.home.check()
        pinned: set[tuple[Namespace, str]] = set()
        for (_, namespace, text), (blocks, _) in self.pins.items():
            assert self.home.known(text, namespace) >= 4 * blocks
            pinned |= self.parts(namespace, text, blocks)
        assert self.home.cache.pinned == len(pinned)

    @staticmethod
    def parts(namespace: Namespace, text: str, blocks: int) -> set[tuple[Namespace, str]]:
        """The blocks of a text, each named by all the text up to its end."""
        return {(namespace, text[: 4 * count]) for count in range(1, blocks + 1)}


TestPinsAgainstModel = PinsAgainstModel.TestCase
TestPinsAgainstModel.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
