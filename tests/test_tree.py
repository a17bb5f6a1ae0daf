"""The tree against a brute-force model: no torch, payloads that know their own tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from rksc_agents.cache.budget import Budget
from rksc_agents.cache.tree import Node, Tree

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)  # few values, so that runs share starts


@dataclass
class Tokens:
    """A payload of one byte per token."""

    tokens: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return len(self.tokens)

    def split(self, at: int) -> tuple[Tokens, Tokens]:
        return Tokens(self.tokens[:at]), Tokens(self.tokens[at:])


def put(tree: Tree, tokens: tuple[int, ...]) -> Node:
    """Store a sequence the way a prefill does."""
    node = tree.match(tokens, len(tokens) - 1).node
    tree.pin(node)
    rest = tokens[node.end :]
    tree.budget.hold(len(rest))
    end = tree.insert(node, rest, Tokens(rest))
    tree.ref(end)
    tree.unpin(node)
    return end


def text(node: Node) -> tuple[int, ...]:
    return tuple(token for part in node.path() for token in part.tokens)


class TreeMachine(RuleBasedStateMachine):
    """Claims, releases and evictions in any order."""

    ends = Bundle("ends")

    @initialize(splittable=st.booleans())
    def start(self, splittable: bool) -> None:
        self.tree = Tree(Budget(10**6), splittable=splittable)
        self.claimed: list[tuple[Node, tuple[int, ...]]] = []
        self.pinned: list[Node] = []

    @rule(target=ends, tokens=TOKENS)
    def store(self, tokens: tuple[int, ...]) -> Node:
        end = put(self.tree, tokens)
        self.claimed.append((end, tokens))
        return end

    @rule(target=ends, tokens=TOKENS, data=st.data())
    def grow(self, tokens: tuple[int, ...], data: st.DataObject) -> Node:
        alive = [(n, t) for n, t in self.claimed if n.alive]
        if not alive:
            return self.store(tokens)
        base, prefix = data.draw(st.sampled_from(alive))
        self.tree.budget.hold(len(tokens))
        end = self.tree.insert(base, tokens, Tokens(tokens), depth=base.depth + 1)
        self.tree.ref(end)
        self.claimed.append((end, prefix + tokens))
        return end

    @precondition(lambda self: self.claimed)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.claimed) - 1))
        node, _ = self.claimed.pop(index)
        if keep and node.alive:
            self.tree.keep(node)
        self.tree.unref(node)

    @precondition(lambda self: self.claimed)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        node, _ = data.draw(st.sampled_from(self.claimed))
        if node.alive:
            self.tree.pin(node)
            self.pinned.append(node)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.tree.unpin(self.pinned.pop())

    @rule(nbytes=st.integers(1, 12))
    def evict(self, nbytes: int) -> None:
        before, could = self.tree.budget.held, self.tree.evictable()
        freed = self.tree.evict(nbytes)
        assert before - self.tree.budget.held == freed
        assert freed >= min(nbytes, could)

    @invariant()
    def books_balance(self) -> None:
        nodes = list(self.tree.nodes())
        assert self.tree.budget.held == sum(len(node.tokens) for node in nodes)
        for node in nodes:
            assert node.alive
            assert node.parent is not None
            assert node.start == node.parent.end
            assert isinstance(node.payload, Tokens)
            assert node.payload.tokens == node.tokens
            assert min(node.pins, node.refs) >= 0
            assert node.children or node.pins or node.refs or node.cached, "a leaf that nobody claims"
            if self.tree.splittable:
                starts = [child.tokens[0] for child in node.children]
                assert len(starts) == len(set(starts)), "two children that start alike"

    @invariant()
    def claims_hold(self) -> None:
        for node, tokens in self.claimed:
            if node.alive:
                assert text(node) == tokens
        assert all(node.alive for node in self.pinned)

    @invariant()
    def matches_are_the_longest(self) -> None:
        paths = [text(node) for node in self.tree.nodes()]
        for probe in ((0, 1, 2, 0), (1, 1, 1, 1), (2, 0)):
            if self.tree.splittable:
                longest = max((_common(path, probe) for path in paths), default=0)
            else:
                longest = max((len(path) for path in paths if probe[: len(path)] == path), default=0)
            # Matching may split nodes, which must not change what is stored.
            node = self.tree.match(probe).node
            if self.tree.splittable:
                assert node.end == longest
            assert text(node) == probe[: node.end]
            assert node.end <= longest

    def teardown(self) -> None:
        for node in self.pinned:
            self.tree.unpin(node)
        for node, _ in self.claimed:
            self.tree.unref(node)
        self.tree.clear()
        assert self.tree.budget.held == 0
        assert not self.tree.root.children


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.lists(TOKENS, min_size=1, max_size=12))
def test_stores_each_shared_token_once(sequences: list[tuple[int, ...]]) -> None:
    tree = Tree(Budget(10**6))
    for sequence in sequences:
        put(tree, sequence)
    assert tree.budget.held == len({sequence[:n] for sequence in sequences for n in range(1, len(sequence) + 1)})


def test_eviction_order() -> None:
    """Cached prefixes first by last use, then claimed branches by score / (depth + 1); pinned ones never."""
    tree = Tree(Budget(10**6))
    old, new = put(tree, (0, 0)), put(tree, (1, 1))
    for node in (old, new):
        tree.keep(node)
        tree.unref(node)
    shallow, deep, doubtful = put(tree, (2, 0)), put(tree, (2, 1)), put(tree, (2, 2))
    deep.depth, doubtful.score = 3, 0.2
    held = put(tree, (3, 3))
    tree.pin(held)
    gone = []
    for _ in range(5):
        tree.evict(1)
        gone += [n for n in (old, new, doubtful, deep, shallow, held) if not n.alive and n not in gone]
    assert gone == [old, new, doubtful, deep, shallow]
    assert held.alive


def test_a_split_node_keeps_its_end() -> None:
    tree = Tree(Budget(10**6))
    end = put(tree, (0, 1, 2))
    put(tree, (0, 2, 2))
    assert text(end) == (0, 1, 2)
    assert end.tokens == (1, 2)


def test_whole_nodes_say_what_lies_beyond() -> None:
    tree = Tree(Budget(10**6), splittable=False)
    put(tree, (0, 1, 2, 1))
    match = tree.match((0, 1, 2, 2))
    assert (match.node.end, match.beyond) == (0, 3)


def test_budget_refuses_to_go_negative() -> None:
    budget = Budget(10)
    budget.hold(3)
    with pytest.raises(AssertionError):
        budget.free(4)
    with pytest.raises(AssertionError):
        budget.settle(1)
