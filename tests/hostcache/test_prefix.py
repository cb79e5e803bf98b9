from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostcache import BlockPool, Namespace, PrefixCache, PrefixHit
from hostcache.errors import UsageError
from hostcache.prefix import PARTIAL_CANDIDATES

HOME = Namespace("model")


def ids(text: str) -> NDArray[np.int32]:
    return np.array([ord(character) for character in text], dtype=np.int32)


class Pool4:
    """A prefix cache over blocks of four tokens, with the bookkeeping a sequence does."""

    def __init__(self, total: int = 16) -> None:
        self.pool = BlockPool(total, 4)
        self.cache = PrefixCache(self.pool)

    def compute(self, text: str, namespace: Namespace = HOME) -> list[int]:
        """Compute a whole text from nothing, publish it, end the sequence; returns its blocks."""
        node = self.cache.root(namespace)
        self.cache.hold_node(node)
        blocks = self.pool.allocate(-(-len(text) // 4))
        for index, block in enumerate(blocks):
            node = self.cache.publish(node, ids(text)[4 * index : 4 * index + 4], block)
        self.pool.release_all(blocks)
        self.cache.release_node(node)
        self.check()
        return blocks

    def lookup(self, text: str, namespace: Namespace = HOME) -> tuple[list[int], int, int]:
        """(full blocks, partial block, partial tokens); everything taken is given back."""
        hit = self.cache.match(namespace, ids(text))
        self.drop(hit)
        return hit.blocks, hit.partial, hit.partial_tokens

    def drop(self, hit: PrefixHit) -> None:
        if hit.partial >= 0:
            self.pool.release(hit.partial)
        self.pool.release_all(hit.blocks)
        self.cache.release_node(hit.node)
        self.check()

    def check(self) -> None:
        self.pool.check()
        self.cache.check()


def test_full_blocks_are_found_in_order() -> None:
    home = Pool4()
    blocks = home.compute("abcdefgh")
    assert home.lookup("abcdefghi") == (blocks, -1, 0)
    assert home.lookup("abcdXXXX") == (blocks[:1], -1, 0)
    assert home.lookup("Xbcdefgh") == ([], -1, 0)


def test_one_token_is_always_left_to_compute() -> None:
    home = Pool4()
    blocks = home.compute("abcdefgh")
    assert home.lookup("abcdefgh") == (blocks[:1], blocks[1], 3)
    assert home.lookup("abcd") == ([], blocks[0], 3)
    assert home.lookup("a") == ([], -1, 0)


def test_a_partly_equal_block_is_offered_for_copying() -> None:
    home = Pool4()
    blocks = home.compute("abcdefgh")
    assert home.lookup("abcdefXY") == (blocks[:1], blocks[1], 2)
    home.compute("abcdefgZ")
    assert home.lookup("abcdefgQ")[2] == 3


def test_a_sequences_tail_is_kept_and_found() -> None:
    home = Pool4()
    blocks = home.compute("abcdef")
    assert home.lookup("abcdefgh") == (blocks[:1], blocks[1], 2)
    assert home.lookup("abcdef") == (blocks[:1], blocks[1], 1)


def test_a_longer_block_replaces_a_tail_it_repeats() -> None:
    home = Pool4()
    home.compute("abcdef")
    assert home.cache.resident == 2
    longer = home.compute("abcdefg")
    assert home.cache.resident == 2
    assert home.lookup("abcdefgX") == ([0], longer[1], 3)
    home.compute("abcdefgh")
    home.compute("abcdef")  # a longer sibling holds it already
    assert home.cache.resident == 2


def test_equal_tokens_behind_different_parents_are_different_nodes() -> None:
    """The parent is part of the key: `same` behind `ABCD` was never computed behind `WXYZ`."""
    home = Pool4()
    home.compute("ABCDsame")
    assert home.lookup("WXYZsame!") == ([], -1, 0)
    blocks = home.compute("WXYZ")
    assert home.lookup("WXYZsame!") == (blocks, -1, 0)


@pytest.mark.parametrize("field", ["numerics", "adapter", "salt", "prompt_version"])
def test_namespaces_share_nothing(field: str) -> None:
    home = Pool4()
    home.compute("abcdefgh")
    assert home.lookup("abcdefgh", Namespace(**{"numerics": "model", field: "other"}))[0] == []


def test_a_namespaces_key_keeps_its_fields_apart() -> None:
    keys = {Namespace("a", "bc").key(), Namespace("ab", "c").key(), Namespace("a", "b", "c").key()}
    assert len(keys) == 3
    assert Namespace("", "adapter").key() != Namespace("adapter", "").key()  # a value that spells a field's name
    assert Namespace("a", salt="x").key() != Namespace("a", prompt_version="x").key()


@pytest.mark.parametrize("value", ["\ud800", None, 5, b"bytes"])
def test_a_namespace_is_made_of_text(value: object) -> None:
    with pytest.raises(UsageError, match=r"salt is .*; it must be text without surrogates"):
        Namespace("model", salt=value)  # type: ignore[arg-type] # that is the point


def test_publishing_an_equal_child_adopts_it() -> None:
    home = Pool4()
    first = home.compute("abcd")
    number = home.cache.match(HOME, ids("abcd!")).node.number
    second = home.compute("abcd")
    hit = home.cache.match(HOME, ids("abcd!"))
    assert hit.blocks == first  # the second block stayed private, and is free again
    assert hit.node.number == number
    assert first != second


def test_a_node_outlives_its_bytes_and_gets_them_back() -> None:
    home = Pool4(total=3)
    home.compute("abcdefgh")
    node = home.cache.match(HOME, ids("abcd!"))
    child = home.cache.match(HOME, ids("abcdefgh!"))
    assert child.node.parent is node.node
    home.drop(node)
    # Someone else holds the child's node, so the parent stays although its block is evicted.
    home.pool.release_all(child.blocks)
    taken = home.pool.allocate(3)
    assert home.cache.resident == 0
    assert home.cache.nodes == 3
    home.pool.release_all(taken)
    home.compute("abcd")
    again = home.cache.match(HOME, ids("abcd!"))
    assert again.node is node.node
    home.drop(again)
    home.cache.release_node(child.node)
    home.pool.release_all(home.pool.allocate(3))
    assert home.cache.nodes == 0


def test_eviction_takes_leaves_before_their_parents_and_old_before_new() -> None:
    home = Pool4(total=5)
    head, leaf = home.compute("abcdefgh")
    (other,) = home.compute("WXYZ")
    home.drop(home.cache.match(HOME, ids("abcd!")))
    left = []
    for count in (3, 4, 5):
        taken = home.pool.allocate(count)
        left.append([block for block in (head, leaf, other) if home.pool.is_cached(block)])
        home.pool.release_all(taken)
    assert left == [[head, other], [head], []]


def test_an_old_parent_is_not_evicted_before_its_newer_leaf() -> None:
    """Two sequences computed the same head at once: the head that was adopted is older than the leaf behind it."""
    home = Pool4(total=4)
    (head,) = home.compute("abcd")
    twin, leaf = home.pool.allocate(2)
    node = home.cache.root(HOME)
    home.cache.hold_node(node)
    node = home.cache.publish(node, ids("abcd"), twin)
    node = home.cache.publish(node, ids("efgh"), leaf)
    home.cache.release_node(node)
    home.pool.release_all([twin, leaf])
    home.pool.allocate(3)
    assert home.pool.is_cached(head)
    assert not home.pool.is_cached(leaf)


def test_node_numbers_are_never_reused() -> None:
    home = Pool4(total=1)
    numbers = []
    for text in ("aaaa", "bbbb", "aaaa", "bbbb"):
        home.compute(text)
        hit = home.cache.match(HOME, ids(text + "!"))
        numbers.append(hit.node.number)
        home.drop(hit)
    assert len(set(numbers)) == 4
    assert numbers == sorted(numbers)


def test_invalidation_hides_a_version_and_spares_its_users() -> None:
    home = Pool4()
    old, new = Namespace("model", prompt_version="1"), Namespace("model", prompt_version="2")
    blocks = home.compute("abcdefgh", old)
    home.compute("abcdefgh", new)
    running = home.cache.match(old, ids("abcdefgh!"))
    assert running.blocks == blocks
    assert home.cache.invalidate(prompt_version="1") == 2
    assert home.lookup("abcdefgh!", old)[0] == []
    assert len(home.lookup("abcdefgh!", new)[0]) == 2
    assert home.pool.refs[blocks[0]] == 1  # the running sequence keeps its blocks
    assert home.cache.publish(running.node, ids("ijkl"), blocks[0]) is running.node
    home.drop(running)
    assert home.pool.free == 16 - 2
    assert home.cache.invalidate() == 2
    assert home.cache.nodes == 0
    assert home.cache.invalidate(namespace=HOME) == 0


def test_a_thousand_tenants_leave_nothing_behind() -> None:
    home = Pool4(total=2)
    for tenant in range(1000):
        home.compute("abcd", Namespace("model", salt=str(tenant)))
    assert home.cache.nodes == 2 * home.cache.resident == 4


@pytest.mark.parametrize("count", [0, 5])
def test_a_node_holds_one_to_a_block_of_tokens(count: int) -> None:
    home = Pool4()
    (block,) = home.pool.allocate(1)
    with pytest.raises(UsageError, match=rf"1\.\.4 tokens, got {count}"):
        home.cache.publish(home.cache.root(HOME), np.zeros(count, np.int32), block)


def test_tokens_of_another_type_are_refused() -> None:
    """Eight int64 tokens have the bytes of sixteen int32 ones."""
    home = Pool4()
    (block,) = home.pool.allocate(1)
    with pytest.raises(UsageError, match="tokens must be int32, got int64"):
        home.cache.publish(home.cache.root(HOME), np.zeros(2, np.int64), block)
    with pytest.raises(UsageError, match="tokens must be int32, got int64"):
        home.cache.match(HOME, np.zeros(2, np.int64))


def test_a_tail_that_finds_no_bytes_leaves_no_node() -> None:
    """A sequence stands on a part of a shared block and ends before it gets a copy of its own.

    So many siblings have come meanwhile that the part is not found among them any more.
    """
    home = Pool4(total=80)
    home.compute("abcd")
    stalled = home.cache.match(HOME, ids("abX"))
    assert stalled.partial_tokens == 2
    for code in range(PARTIAL_CANDIDATES):
        home.compute(f"{chr(1000 + code)}xyz")
    assert home.cache.publish(stalled.node, ids("ab"), stalled.partial) is stalled.node
    home.drop(stalled)
    assert home.cache.nodes == 1 + 1 + PARTIAL_CANDIDATES  # the root, abcd, and the siblings
    home.pool.release_all(home.pool.allocate(80))
    assert home.cache.nodes == 0


@settings(max_examples=80, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=14), max_size=12), st.text("ab", min_size=1, max_size=14))
def test_the_longest_known_beginning_is_found(texts: list[str], prompt: str) -> None:
    """Against the naive answer: the longest common beginning with anything computed, one token always left."""
    home = Pool4(total=64)
    for text in texts:
        home.compute(text)
    blocks, _, partial = home.lookup(prompt)
    known = max((len(_common(text, prompt[:-1])) for text in texts), default=0)
    assert 4 * len(blocks) + partial == known


def _common(left: str, right: str) -> str:
    return "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
