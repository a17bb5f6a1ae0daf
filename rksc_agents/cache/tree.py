"""The KV tree: a radix tree of token runs that lives across requests. Knows no torch.

A node is a run of tokens whose KV is stored once and never changes. The path from the root to a
node is a sequence, so everything that starts with the same tokens shares the nodes it has in
common: branches of one question, turns of one conversation, questions under one system prompt.

Three claims keep a node: a *pin* (work that runs now; never evicted), a *reference* (a handle that
may be decoded again; evicted late and recomputed when needed), and `cached` (a prefix worth
keeping for later requests; evicted first, least recently used first). A node with none of them and
no children goes at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rksc_agents.cache.budget import Budget


class Payload(Protocol):
    """What a node stores for its tokens."""

    @property
    def nbytes(self) -> int: ...

    def split(self, at: int) -> tuple[Payload, Payload]:
        """Two payloads, for the first `at` tokens and for the rest."""
        ...


class Node:
    """A run of tokens and the payload stored for it.

    Attributes
    ----------
    tokens : tuple of int
        The run.
    start : int
        Position of its first token in the sequence.
    depth, score : int, float
        Reasoning depth and branch score; RSBCM evicts by score / (depth + 1).
    alive : bool
        False once evicted or pruned.
    private : bool
        Its payload is not what its path computes to (KV taken from another position), so it is never matched.
    """

    __slots__ = ("alive", "cached", "children", "depth", "parent", "payload", "pins", "private", "refs", "score",
                 "start", "tokens", "used")  # fmt: skip

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], payload: Payload | None, depth: int = 0) -> None:
        self.parent = parent
        self.tokens = tokens
        self.payload = payload
        self.start = 0 if parent is None else parent.end
        self.depth = depth
        self.score = 1.0
        self.children: list[Node] = []
        self.pins = 0
        self.refs = 0
        self.cached = False
        self.used = 0
        self.alive = True
        self.private = False

    @property
    def end(self) -> int:
        """Position after its last token, which is the length of the sequence it ends."""
        return self.start + len(self.tokens)

    @property
    def omega(self) -> float:
        """RSBCM's worth of a node: score / (depth + 1)."""
        return self.score / (self.depth + 1)

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a sequence.

    `node` ends at `node.end` tokens. `beyond` more tokens agree with a child that cannot be split:
    computing up to there makes a node that the next request can reuse.
    """

    node: Node
    beyond: int = 0


class Tree:
    """Radix tree of token runs under a byte budget.

    Parameters
    ----------
    budget : Budget
        Counts the payloads' bytes.
    splittable : bool, default True
        Whether payloads can be split. Recurrent states cannot: such a model reuses whole nodes only.
    """

    def __init__(self, budget: Budget, *, splittable: bool = True) -> None:
        self.budget = budget
        self.splittable = splittable
        self.root = Node(None, (), None)
        self.evicted = 0
        self._clock = 0

    # -- looking up -----------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], limit: int | None = None, *, under: Node | None = None) -> Match:
        """Find the longest cached prefix of `tokens`, at most `limit` tokens long, splitting a node if needed.

        With `under`, whose path `tokens` begins with, look below that node only.
        """
        limit = len(tokens) if limit is None else min(limit, len(tokens))
        node, beyond = under if under is not None else self.root, 0
        while node.end < limit:
            child, common = self._best_child(node, tokens, node.end, limit)
            if child is None:
                break
            if common < len(child.tokens):
                if not self.splittable:
                    beyond = common
                    break
                child = self._split(child, common)
            node = child
        self._touch(node)
        return Match(node, beyond)

    def _best_child(self, node: Node, tokens: Sequence[int], offset: int, limit: int) -> tuple[Node | None, int]:
        """The child that shares most with `tokens[offset:limit]`, and how much; where nodes are whole or nothing,
        the longest whole match comes before any partial one."""
        best: tuple[bool, int] = (False, 0)
        chosen: Node | None = None
        for child in node.children:
            common = 0 if child.private else _common(child.tokens, tokens, offset, limit)
            rank = (common == len(child.tokens), common) if not self.splittable else (False, common)
            if common and rank > best:
                best, chosen = rank, child
        return chosen, best[1]

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before children."""
        stack = list(self.root.children)
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    # -- changing -------------------------------------------------------------------------------

    def insert(self, parent: Node, tokens: tuple[int, ...], payload: Payload, depth: int = 0) -> Node:
        """Add a run below `parent` and return the node that ends it.

        The payload's bytes must be held in the budget already. Where the same tokens are stored
        already, the stored ones stay and the new payload's bytes are freed.
        """
        assert tokens, "a node holds at least one token"
        node = parent
        while tokens:
            child, common = self._best_child(node, tokens, 0, len(tokens))
            if child is None or (common < len(child.tokens) and not self.splittable):
                break
            if common < len(child.tokens):
                child = self._split(child, common)
            if common < len(tokens) and not self.splittable:
                break  # the payload cannot be cut either: keep it whole, beside its relative
            if common == len(tokens):
                self.budget.free(payload.nbytes)
                self._touch(child)
                return child
            head, payload = payload.split(common)
            self.budget.free(head.nbytes)
            node, tokens = child, tokens[common:]
        new = Node(node, tokens, payload, depth)
        new.score = node.score  # until somebody says how good it is itself
        node.children.append(new)
        self._touch(new)
        return new

    def insert_private(self, parent: Node, tokens: tuple[int, ...], payload: Payload, depth: int = 0) -> Node:
        """Add a run whose payload is good for this place alone: no sequence is ever matched into it."""
        new = Node(parent, tokens, payload, depth)
        new.private = True
        parent.children.append(new)
        self._touch(new)
        return new

    def _split(self, node: Node, at: int) -> Node:
        """Put a new node before `node` that takes its first `at` tokens; `node` keeps its end and its claims."""
        assert node.parent is not None and node.payload is not None and 0 < at < len(node.tokens)
        head_payload, tail_payload = node.payload.split(at)
        head = Node(node.parent, node.tokens[:at], head_payload, node.depth)
        head.cached, head.score, head.used = node.cached, node.score, node.used
        siblings = node.parent.children
        siblings[siblings.index(node)] = head
        head.children.append(node)
        node.parent, node.tokens, node.payload, node.start = head, node.tokens[at:], tail_payload, head.end
        return head

    # -- claims ---------------------------------------------------------------------------------

    def pin(self, node: Node) -> None:
        """Keep `node` and its ancestors while work runs on them."""
        node.pins += 1
        self._touch(node)

    def unpin(self, node: Node) -> None:
        """Undo one :meth:`pin`."""
        assert node.pins > 0, "unpinned more often than pinned"
        node.pins -= 1
        self._prune(node)

    def ref(self, node: Node) -> None:
        """Claim `node` for a handle."""
        node.refs += 1

    def unref(self, node: Node) -> None:
        """Undo one :meth:`ref`; what nobody claims goes at once."""
        assert node.refs > 0, "released more often than claimed"
        node.refs -= 1
        self._prune(node)

    def keep(self, node: Node) -> None:
        """Keep `node` and its ancestors as a cached prefix for later requests."""
        for each in node.path():
            each.cached = True
            self._touch(each)

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock

    def _prune(self, node: Node) -> None:
        while node.alive and node is not self.root and not (node.children or node.pins or node.refs or node.cached):
            assert node.parent is not None
            parent = node.parent
            self._remove(node)
            node = parent

    def _remove(self, node: Node) -> None:
        assert node.parent is not None and node.payload is not None and not node.children
        node.parent.children.remove(node)
        self.budget.free(node.payload.nbytes)
        node.payload = None
        node.alive = False

    # -- eviction (RSBCM) -----------------------------------------------------------------------

    def evict(self, nbytes: int) -> int:
        """Evict leaves until `nbytes` are free or nothing more can go; return the bytes freed.

        Cached prefixes without a handle go first, least recently used first; then referenced
        branches by omega = score / (depth + 1), lowest first. Pinned paths never go.
        """
        freed = 0
        while freed < nbytes:
            leaves = [node for node in self.nodes() if not node.children and not node.pins]
            if not leaves:
                break
            victim = min(leaves, key=lambda n: (n.refs > 0, n.omega if n.refs else 0.0, n.used))
            parent = victim.parent
            assert victim.payload is not None and parent is not None
            before = self.budget.held
            self._remove(victim)
            self.evicted += 1
            self._prune(parent)
            freed += before - self.budget.held
        return freed

    def evictable(self) -> int:
        """Bytes that eviction could free now."""
        return sum(self._subtree_evictable(child)[0] for child in self.root.children)

    def _subtree_evictable(self, top: Node) -> tuple[int, bool]:
        # Iterative post-order: a deep conversation must not hit the recursion limit.
        order = [top]
        for node in order:
            order.extend(node.children)
        fixed: set[int] = set()
        total = 0
        for node in reversed(order):
            if node.pins or any(id(child) in fixed for child in node.children):
                fixed.add(id(node))
            else:
                assert node.payload is not None
                total += node.payload.nbytes
        return total, id(top) in fixed

    def clear(self) -> None:
        """Forget every node that is neither pinned nor referenced."""
        for node in reversed(list(self.nodes())):
            node.cached = False
            self._prune(node)


def _common(run: Sequence[int], tokens: Sequence[int], offset: int, limit: int) -> int:
    """How many tokens of `run` equal `tokens[offset:limit]`."""
    length = min(len(run), limit - offset)
    if length <= 0:
        return 0
    if tuple(run[:length]) == tuple(tokens[offset : offset + length]):
        return length
    return next(i for i in range(length) if run[i] != tokens[offset + i])
