"""The prefix cache against a dictionary of whole prefixes, under eviction, invalidation, forks and fences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hostcache import BlockPool, BlockTable, Fence, Namespace, PrefixCache, PrefixNode

SIZE = 3  # tokens in a block: tails of one and of two
NAMESPACES = (Namespace("m"), Namespace("m", salt="tenant"), Namespace("m", prompt_version="2"))

Key = tuple[int, tuple[int, ...]]
"""A whole prefix: the life of a namespace it belongs to (an invalidated one begins another), and all its tokens."""

prompts = st.lists(st.sampled_from((0, 0, 0, 1)), min_size=1, max_size=11).map(tuple)
rarely = st.sampled_from((False,) * 5 + (True,))


@dataclass(eq=False)
class Sequence:
    namespace: int
    life: int
    tokens: tuple[int, ...]
    table: BlockTable
    node: PrefixNode
    published: int

    @property
    def standing(self) -> Key:
        """The node it holds."""
        return self.life, self.tokens[: self.published * SIZE]


class PrefixAgainstModel(RuleBasedStateMachine):
    total = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.total, SIZE)
        self.cache = PrefixCache(self.pool)
        self.real_evict, self.pool.evict = self.pool.evict, self.evict
        self.memory: list[list[Key | None]] = [
            [None] * SIZE for _ in range(self.total)
        ]  # what each slot was computed for
        self.known: dict[Key, int] = {}  # full prefixes and tails, and the block that ends with them
        self.lives = [0, 1, 2]  # of the namespaces
        self.next_life = 3
        self.sequences: list[Sequence] = []
        self.fences: list[tuple[Fence, int]] = []
        self.idle: list[int] = []  # kept blocks without references or fences, in the order they became so
        self.numbers: dict[Key, int] = {}  # of nodes that are in the tree
        self.highest = 0

    # What the cache should do, in the slowest way.

    def copy(self, source: int, destination: int, tokens: int) -> None:
        self.memory[destination][:tokens] = self.memory[source][:tokens]

    def nodes(self) -> set[Key]:
        """Everything that has bytes or a holder, and all that is in front of it."""
        alive = set(self.lives)
        wanted = [*self.known, *(s.standing for s in self.sequences if s.life in alive)]
        return {
            key
            for life, tokens in wanted
            for key in [(life, tokens), *((life, tokens[:end]) for end in range(0, len(tokens), SIZE))]
        }

    def behind(self, key: Key) -> list[Key]:
        """Known children and tails of a node."""
        life, tokens = key
        return [
            (other, longer)
            for other, longer in self.known
            if other == life and len(tokens) < len(longer) <= len(tokens) + SIZE and longer[: len(tokens)] == tokens
        ]

    def observe(self, key: Key, node: PrefixNode) -> None:
        """A node keeps its number while it is in the tree; a new one gets a number that never was."""
        if key in self.numbers:
            assert node.number == self.numbers[key]
        else:
            assert node.number > self.highest
            self.numbers[key] = node.number
        self.highest = max(self.highest, node.number)

    def forget(self, key: Key) -> None:
        block = self.known.pop(key)
        if block in self.idle:
            self.idle.remove(block)
        self.prune()

    def prune(self) -> None:
        """Forget the numbers of nodes that are not in the tree any more."""
        nodes = self.nodes()
        self.numbers = {key: number for key, number in self.numbers.items() if key in nodes}

    def evict(self, oldest: int) -> int:
        assert oldest == self.idle[0]
        names = {block: key for key, block in self.known.items()}
        victim = self.real_evict(oldest)
        life, start = names[oldest]
        assert names[victim][0] == life
        assert names[victim][1][: len(start)] == start
        assert victim in self.idle
        assert not [key for key in self.behind(names[victim]) if self.known[key] in self.idle]
        self.forget(names[victim])
        return victim

    def publish(self, sequence: Sequence, tokens: tuple[int, ...], block: int) -> None:
        """Publish a block full of tokens, or a tail, behind the node the sequence stands on."""
        life, front = standing = sequence.standing
        text = np.array(tokens, np.int32)
        if life not in self.lives:
            assert self.cache.publish(sequence.node, text, block) is sequence.node
            return
        key = (life, front + tokens)
        longer = [
            other for _, other in self.behind(standing) if len(other) > len(key[1]) and other[: len(key[1])] == key[1]
        ]
        stored = key not in self.known and not self.pool.is_kept(block)
        if len(tokens) < SIZE:
            stored &= not longer
        if stored:
            self.known[key] = block
        for end in range(1, len(tokens)):  # tails that say no more than this
            if stored and (life, front + tokens[:end]) in self.known:
                self.forget((life, front + tokens[:end]))
        node = self.cache.publish(sequence.node, text, block)
        if len(tokens) < SIZE:
            assert node is sequence.node
        else:
            self.observe(key, node)
        sequence.node = node

    # What happens to it.

    @rule(namespace=st.sampled_from((0, 0, 0, 1, 2)), prompt=prompts, stalled=rarely)
    def start(self, namespace: int, prompt: tuple[int, ...], *, stalled: bool) -> None:
        """A request: what is known of its prompt is taken over, the rest computed, unless it stalls first."""
        if len(self.sequences) == 4:
            self.finish_one(self.sequences[0])
        life, usable = self.lives[namespace], prompt[:-1]
        full = 0
        while (life, usable[: (full + 1) * SIZE]) in self.known and (full + 1) * SIZE <= len(usable):
            full += 1
        front, rest = usable[: full * SIZE], usable[full * SIZE :]
        partial = max((common(key[full * SIZE :], rest) for _, key in self.behind((life, front))), default=0)

        hit = self.cache.match(NAMESPACES[namespace], np.array(prompt, np.int32))
        assert hit.blocks == [self.known[life, usable[: (i + 1) * SIZE]] for i in range(full)]
        assert (hit.partial >= 0, hit.partial_tokens) == (partial > 0, partial)
        self.observe((life, front), hit.node)

        table = BlockTable(self.pool, self.copy)
        blocks = hit.blocks + [hit.partial] * (partial > 0)
        tokens = usable[: full * SIZE + partial]
        table.adopt(blocks, len(tokens))
        sequence = Sequence(namespace, life, tokens, table, hit.node, full)
        self.sequences.append(sequence)
        self.refer(blocks)
        for position in range(len(tokens)):  # the point of it all
            slot = table.slot(position)
            assert self.memory[slot // SIZE][slot % SIZE] == (life, tokens[: position + 1])
        if not stalled:
            self.advance(sequence, prompt[len(tokens) :])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=prompts)
    def compute(self, data: st.DataObject, tokens: tuple[int, ...]) -> None:
        self.advance(data.draw(st.sampled_from(self.sequences)), tokens)

    def advance(self, sequence: Sequence, tokens: tuple[int, ...]) -> None:
        tokens = tokens[: 5 * SIZE - len(sequence.tokens)]
        if sequence.table.blocks_needed(len(tokens)) > self.pool.available:
            return
        sequence.table.append(len(tokens))
        for token in tokens:
            slot = sequence.table.slot(len(sequence.tokens))
            sequence.tokens += (token,)
            self.memory[slot // SIZE][slot % SIZE] = (sequence.life, sequence.tokens)
        self.settle()  # a shared tail was let go
        for index in range(sequence.published, len(sequence.tokens) // SIZE):
            block = sequence.table.blocks[index]
            self.publish(sequence, sequence.tokens[index * SIZE : (index + 1) * SIZE], block)
            sequence.published += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.sequences))
        if len(self.sequences) < 4:
            self.cache.hold_node(parent.node)
            child = Sequence(
                parent.namespace, parent.life, parent.tokens, parent.table.fork(), parent.node, parent.published
            )
            self.sequences.append(child)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.finish_one(data.draw(st.sampled_from(self.sequences)))

    def finish_one(self, sequence: Sequence) -> None:
        tail = sequence.tokens[sequence.published * SIZE :]
        if tail:
            self.publish(sequence, tail, sequence.table.blocks[-1])
        self.sequences.remove(sequence)
        blocks = list(sequence.table.blocks)
        sequence.table.release()
        self.cache.release_node(sequence.node)
        self.settle(blocks[::-1])
        self.prune()

    @rule(count=st.sampled_from((1, 2, 3, total)))
    def press(self, count: int) -> None:
        """Somebody needs blocks, and gives them back unused."""
        if count <= self.pool.available:
            self.pool.release_all(self.pool.allocate(count))

    @rule(block=st.integers(0, total - 1), lower=st.booleans())
    def fence(self, block: int, *, lower: bool) -> None:
        if self.fences and lower:
            fence, block = self.fences.pop()
            fence.release()
            self.settle([block])
        elif len(self.fences) < 2 and (self.pool.refs[block] or self.pool.is_kept(block)):
            self.fences.append((self.pool.fence([block]), block))
            self.refer([block])

    @precondition(lambda self: len(self.known) > 3)
    @rule(which=st.sampled_from([{"namespace": NAMESPACES[0]}, {"prompt_version": "2"}, {"prompt_version": ""}, {}]))
    def invalidate(self, which: dict[str, object]) -> None:
        hidden = [
            index
            for index, namespace in enumerate(NAMESPACES)
            if which.get("namespace", namespace) == namespace
            and which.get("prompt_version", namespace.prompt_version) == namespace.prompt_version
        ]
        lives = [self.lives[index] for index in hidden]
        gone = [key for key in self.known if key[0] in lives]
        assert self.cache.invalidate(**which) == len(gone)  # type: ignore[arg-type] # either keyword, or none
        for key in gone:
            self.forget(key)
        for index in hidden:
            self.lives[index] = self.next_life
            self.next_life += 1

    # The order in which kept blocks became idle.

    def is_idle(self, block: int) -> bool:
        held = self.pool.refs[block] or any(block == other for _, other in self.fences)
        return not held and block in self.known.values()

    def refer(self, blocks: list[int]) -> None:
        self.idle = [block for block in self.idle if block not in blocks]

    def settle(self, blocks: list[int] | None = None) -> None:
        """Some blocks lost a reference or a fence, in this order; None: at most one did."""
        candidates = range(self.total) if blocks is None else blocks
        self.idle += [block for block in candidates if self.is_idle(block) and block not in self.idle]

    @invariant()
    def agree(self) -> None:
        self.pool.check()
        self.cache.check()
        assert {block for block in range(self.total) if self.pool.is_kept(block)} == set(self.known.values())
        assert self.cache.resident == len(self.known)
        for (life, tokens), block in self.known.items():
            start = (len(tokens) - 1) // SIZE * SIZE
            expected = [(life, tokens[: end + 1]) for end in range(start, len(tokens))]
            assert self.memory[block][: len(expected)] == expected
        assert self.cache.nodes == len(self.nodes())


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Leading tokens that two runs share."""
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


TestPrefixAgainstModel = PrefixAgainstModel.TestCase
TestPrefixAgainstModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
