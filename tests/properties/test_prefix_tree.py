"""The block pool's index and free list are a radix tree over blocks that evicts the least recently used leaf.

The model is that tree, written out: nodes with children, locks and the time of their last unlock. After every
operation both must know exactly the same prefixes, and every lookup must find all full blocks that the tree has.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core_node.engine.blocks import BlockPool

N_BLOCKS = 9
Path = tuple[int, ...]  # one letter a block; the first one is the namespace


@dataclass(slots=True, eq=False)
class Node:
    path: Path
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    locks: int = 0
    unlocked_at: int = 0


class RadixTree:
    """Bounded by blocks: locked nodes, unlocked ones, and blocks that sequences fill beside the tree."""

    def __init__(self) -> None:
        self.root = Node((), None)
        self.clock = 0
        self.filling = 0

    def nodes(self) -> list[Node]:
        found, todo = [], [self.root]
        while todo:
            node = todo.pop()
            found.append(node)
            todo += node.children.values()
        return [n for n in found if n is not self.root]

    def match(self, path: Path) -> list[Node]:
        found, node = [], self.root
        for letter in path:
            if letter not in node.children:
                break
            node = node.children[letter]
            found.append(node)
        return found

    @property
    def n_free(self) -> int:
        return N_BLOCKS - self.filling - sum(1 for n in self.nodes() if n.locks)

    def fill(self) -> None:
        """Take a block: one that nobody uses, or that of the least recently used unlocked leaf."""
        if len(self.nodes()) + self.filling == N_BLOCKS:
            leaves = [n for n in self.nodes() if not n.locks and not n.children]
            victim = min(leaves, key=lambda n: n.unlocked_at)
            assert victim.parent is not None
            del victim.parent.children[victim.path[-1]]
        self.filling += 1

    def insert(self, path: Path) -> None:
        """The block that was being filled becomes a locked node, or is given back if the tree has it already."""
        self.filling -= 1
        *_, parent = (self.root, *self.match(path[:-1]))
        assert parent.path == path[:-1]
        parent.children.setdefault(path[-1], Node(path, parent)).locks += 1

    def unlock(self, path: Path) -> None:
        for node in reversed(self.match(path)):
            node.locks -= 1
            if node.locks == 0:
                self.clock += 1
                node.unlocked_at = self.clock


def name(path: Path) -> bytes:
    return bytes(path)


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(N_BLOCKS)
        self.tree = RadixTree()
        self.tables: list[tuple[Path, list[int]]] = []
        self.filling: list[int] = []  # blocks of sequences that are not full yet

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple))
    def admit(self, path: Path) -> None:
        hits = self.pool.find(name(path[:i]) for i in range(1, len(path) + 1))
        matched = self.tree.match(path)
        assert len(hits) == len(matched), "a full block that is there was not found, or one was that is not"
        missing = len(path) - len(hits)
        n_free = self.pool.n_free_without(hits)
        assert n_free == self.tree.n_free - sum(1 for n in matched if not n.locks)
        if missing > n_free:
            return
        self.pool.take(hits)
        for node in matched:
            node.locks += 1
        table = hits + self.pool.allocate(missing)
        for _ in range(missing):
            self.tree.fill()
        for i in range(len(hits), len(path)):
            table[i] = self.pool.name(table[i], name(path[: i + 1]))
            self.tree.insert(path[: i + 1])
        self.tables.append((path, table))

    @rule(letter=st.integers(0, 2), which=st.integers(0, 100))
    @precondition(lambda self: self.tables)
    def grow(self, letter: int, which: int) -> None:
        """A block of generated tokens; another sequence may have filled an equal one."""
        path, table = self.tables[which % len(self.tables)]
        if self.pool.n_free and len(path) < 6:
            (block,) = self.pool.allocate(1)
            self.tree.fill()
            longer = (*path, letter)
            table.append(self.pool.name(block, name(longer)))
            self.tree.insert(longer)
            self.tables[which % len(self.tables)] = (longer, table)

    @rule(which=st.integers(0, 100))
    @precondition(lambda self: self.tables)
    def end(self, which: int) -> None:
        path, table = self.tables.pop(which % len(self.tables))
        self.pool.free(table)
        self.tree.unlock(path)

    @rule()
    def begin_to_fill(self) -> None:
        """A block that is not full stays outside the tree."""
        if self.pool.n_free:
            self.filling += self.pool.allocate(1)
            self.tree.fill()

    @rule()
    @precondition(lambda self: self.filling)
    def drop_what_is_not_full(self) -> None:
        self.pool.free([self.filling.pop()])
        self.tree.filling -= 1

    @invariant()
    def both_know_the_same_prefixes(self) -> None:
        self.pool.check([*(table for _, table in self.tables), self.filling])
        assert set(self.pool.names()) == {name(n.path) for n in self.tree.nodes()}


TestPrefixTree = TreeMachine.TestCase
TestPrefixTree.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
