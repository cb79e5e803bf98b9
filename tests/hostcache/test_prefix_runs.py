"""Prompts are compared with whole runs of nodes: where they part, where bytes are missing, where nodes are removed."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache import BlockPool, Namespace, PrefixCache
from hostcache.errors import BlockStateError
from hostcache.prefix_node import PrefixNode, common_tokens

HOME = Namespace("model")


class Tree:
    """A prefix cache over blocks of two tokens; text is written as letters, a block of text as two of them."""

    def __init__(self, total: int = 32) -> None:
        self.pool = BlockPool(total, 2)
        self.cache = PrefixCache(self.pool)

    def grow(self, text: str) -> list[PrefixNode]:
        """Publish a text's blocks, each in a block of its own, and let go of them; returns the nodes."""
        node = self.cache.root(HOME)
        self.cache.hold_node(node)
        blocks = self.pool.allocate(len(text) // 2)
        nodes = []
        for index, block in enumerate(blocks):
            node = self.cache.publish(node, ids(text[2 * index : 2 * index + 2]), block)
            nodes.append(node)
        self.pool.release_all(blocks)
        self.cache.release_node(node)
        self.cache.check()
        return nodes

    def find(self, text: str) -> list[int]:
        """The full blocks known of a text; nothing is kept."""
        hit = self.cache.match(HOME, ids(text + "!"))
        self.pool.release_all([*hit.blocks, *([hit.partial] if hit.partial >= 0 else ())])
        self.cache.release_node(hit.node)
        self.cache.check()
        assert self.cache.known_tokens(HOME, ids(text)) == 2 * len(hit.blocks)
        return hit.blocks


def ids(text: str) -> NDArray[np.int32]:
    return np.array([ord(letter) for letter in text], dtype=np.int32)


def blocks_of(nodes: list[PrefixNode]) -> list[int]:
    return [node.block for node in nodes]


def test_a_path_is_one_run_and_every_other_child_begins_another() -> None:
    tree = Tree()
    trunk = tree.grow("aabbccdd")
    branch = tree.grow("aabbxxyy")[2:]
    twig = tree.grow("aabbxxzz")[3:]
    later = tree.grow("aabbccddee")[4:]
    runs = [{id(node.run) for node in nodes} for nodes in (trunk + later, branch, twig)]
    assert [len(run) for run in runs] == [1, 1, 1]
    assert len(set.union(*runs)) == 3
    assert [node.place for node in trunk + later + branch + twig] == [0, 1, 2, 3, 4, 0, 1, 0]


def test_a_lookup_goes_from_run_to_run() -> None:
    tree = Tree()
    trunk = tree.grow("aabbccdd")
    branch = tree.grow("aabbxxyy")
    twig = tree.grow("aabbxxzz")
    assert tree.find("aabbccdd") == blocks_of(trunk)
    assert tree.find("aabbxxyyqq") == blocks_of(trunk[:2] + branch[2:])
    assert tree.find("aabbxxzz") == blocks_of(trunk[:2] + branch[2:3] + twig[3:])
    assert tree.find("aabbqq") == blocks_of(trunk[:2])
    assert tree.find("bbccdd") == []
    assert tree.find("aaqqaabbccdd") == blocks_of(trunk[:1])  # all of a run, but later


@pytest.mark.parametrize("differing", range(8))
def test_a_prompt_is_followed_up_to_its_first_token_that_differs(differing: int) -> None:
    tree = Tree()
    nodes = tree.grow("aabbccdd")
    prompt = ids("aabbccdd!")
    prompt[differing] ^= -(1 << 31)  # the last bit that a token has
    hit = tree.cache.match(HOME, prompt)
    assert hit.blocks == blocks_of(nodes[: differing // 2])
    assert hit.node is (nodes[differing // 2 - 1] if differing > 1 else tree.cache.root(HOME))
    assert hit.partial_tokens == differing % 2


@pytest.mark.parametrize("lost", range(4))
def test_a_run_is_followed_up_to_the_first_node_without_bytes(lost: int) -> None:
    tree = Tree()
    nodes = tree.grow("aabbccdd")
    assert tree.find("aabbccdd") == blocks_of(nodes)  # as has been seen once
    running = tree.cache.match(HOME, ids("aabbccdd!")).node  # it keeps the nodes in the tree
    tree.cache.forget(nodes[lost].block)
    assert tree.find("aabbccdd") == blocks_of(nodes[:lost])
    assert tree.grow("aabbccdd") == nodes
    assert tree.find("aabbccdd") == blocks_of(nodes)
    tree.cache.release_node(running)


def test_bytes_that_come_back_are_found_as_far_as_they_reach() -> None:
    tree = Tree()
    nodes = tree.grow("aabbccdd")
    tree.cache.forget(nodes[1].block)
    tree.cache.forget(nodes[2].block)
    assert tree.find("aabbccdd") == blocks_of(nodes[:1])
    tree.grow("aabb")
    assert tree.find("aabbccdd") == blocks_of(nodes[:2])  # the third has none yet
    tree.grow("aabbcc")
    assert tree.find("aabbccdd") == blocks_of(nodes)  # the fourth has kept its own


def test_a_removed_node_can_be_followed_by_another() -> None:
    tree = Tree()
    nodes = tree.grow("aabbcc")
    tree.cache.forget(nodes[2].block)
    assert tree.cache.nodes == 1 + 2
    other = tree.grow("aabbxx")
    assert other[2].run is nodes[0].run
    assert tree.find("aabbxx") == blocks_of(other)
    assert tree.find("aabbcc") == blocks_of(nodes[:2])
    for node in reversed(other):
        tree.cache.forget(node.block)
    assert tree.cache.nodes == 0
    assert tree.find("aabb") == []


def test_an_invalidated_run_is_not_found_and_not_continued() -> None:
    tree = Tree()
    tree.grow("aabb")
    running = tree.cache.match(HOME, ids("aabb!"))
    tree.cache.invalidate()
    nodes = tree.grow("aa")
    assert tree.find("aabb") == blocks_of(nodes)
    assert tree.cache.publish(running.node, ids("cc"), running.blocks[0]) is running.node
    assert tree.find("aabbcc") == blocks_of(nodes)


def test_a_run_that_does_not_know_where_the_bytes_are_is_seen() -> None:
    tree = Tree()
    nodes = tree.grow("aabb")
    assert nodes[0].run is not None
    assert tree.find("aabb") == blocks_of(nodes)
    nodes[0].run.nodes.reverse()
    with pytest.raises(BlockStateError, match=f"node {nodes[0].number} and its run do not agree"):
        tree.cache.check()


@pytest.mark.parametrize(
    ("left", "right", "common"),
    [("", "", 0), ("abc", "", 0), ("abc", "abc", 3), ("abc", "abcd", 3), ("abcd", "abXd", 2), ("a", "b", 0)],
)
def test_common_tokens_are_counted_from_the_front(left: str, right: str, common: int) -> None:
    assert common_tokens(ids(left).tobytes(), ids(right).tobytes()) == common
