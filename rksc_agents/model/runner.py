"""The only caller of the model's forward, over the KV tree.

The model is used through two public extension points of transformers: a `Cache` object, and a
function registered in `AttentionInterface`. No model code is patched, and the model is left as it
was found when :meth:`TreeRunner.attached` ends.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from rksc_agents.cache.store import LayerShape, Layout, Segment, State, Tail
from rksc_agents.cache.tree import Node, Tree
from rksc_agents.errors import EngineError, UnsupportedModelError
from rksc_agents.model.attention import tree_attention
from rksc_agents.model.borrowed import BorrowedModel
from rksc_agents.model.exits import Watch
from rksc_agents.model.plan import Plan, Run
from rksc_agents.model.protocol import output_device, vocabulary_size
from rksc_agents.model.readout import LastTokens, Settled, measured
from rksc_agents.model.rotation import Rotation
from rksc_agents.model.tree_cache import LayerKinds, StateSlot, TreeCache, cat_states, split_states

_names = itertools.count()


class TreeRunner(BorrowedModel):
    """Runs a Hugging Face causal language model on the KV tree.

    Parameters
    ----------
    model : PreTrainedModel
        Left as found outside :meth:`attached`.
    budget : Budget
        Counts the bytes of all tails.

    Attributes
    ----------
    layout : Layout
        What a token of KV takes, measured with a one-token pass.
    splittable : bool
        Whether nodes can be split; False for models with recurrent states.
    readout : Readout or None
        What the head makes of hidden states; None where it could not be found out, and no pass can end early.
    """

    def _prepare(self) -> None:
        self.kinds = LayerKinds(self.model.config)
        self._plan: Plan | None = None
        self._lent: list[tuple[int, Tensor]] = []
        self._name = f"rksc_tree_{next(_names)}"
        self._seen: dict[int, LayerShape] = {}
        self._slots: list[StateSlot] = []
        self.layout = self._measure()
        self.splittable = not self.kinds.linear
        self.chunked = True
        self.shares = True
        self.retryable = True

    # -- the model, borrowed --------------------------------------------------------------------

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Switch the model's attention to the tree, and back at the end."""
        before = self.model.config._attn_implementation
        self._thread = threading.get_ident()
        AttentionInterface.register(self._name, self._attend)
        try:
            self.model.set_attn_implementation(self._name)
            yield
        finally:
            self.model.set_attn_implementation(before)
            AttentionInterface._global_mapping.pop(self._name, None)

    def _measure(self) -> Layout:
        """Find out what each layer stores by computing one token."""
        with self.attached(), torch.inference_mode(), measured(self.model) as readouts:
            cache = TreeCache(self.kinds, 0, [], None)
            self._lent = []
            token = vocabulary_size(self.model) // 2  # token 0 often pads, and embeds as nothing
            self._call(torch.tensor([[token]]), [0], cache, torch.tensor([0]))
        self.readout = readouts[0] if readouts else None
        self._slots = cache.slots()
        state = cache.state(self._slots)
        return Layout(dict(self._seen), sum(t.nbytes for t in state))

    # -- storage --------------------------------------------------------------------------------

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token."""
        return self.layout.token_bytes

    @property
    def depth(self) -> int:
        """Layers of the model."""
        return self.kinds.count

    def most_bytes(self, ends: Sequence[int], most: int) -> int:
        """Bytes that rows after bases that end at `ends` take at most for `most` tokens each, beside the bases."""
        return Tail.most_bytes(self.layout, len(ends), most)

    def tail(self, bases: Sequence[Node], most: int, promised: int) -> Tail:
        """A tail for rows that start after `bases` and add at most `most` tokens each."""
        state = None
        if self._slots and bases[0].payload is not None:
            payloads = [base.payload for base in bases]
            assert all(isinstance(p, Segment) and p.state is not None for p in payloads)
            state = [torch.cat(parts) for parts in zip(*(p.state for p in payloads), strict=True)]  # type: ignore[union-attr]
        return Tail(self.layout, self.budget, len(bases), most, state=state, promised=promised)

    def rotation(self) -> Rotation:
        """How the model's keys turn with their position.

        Raises
        ------
        UnsupportedModelError
            If they do not turn, or the model also has states that no token can be taken out of.
        """
        if not self.splittable:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} keeps recurrent states, which hold a whole prefix at once: KV cannot be "
                "taken from other positions; use mode exact"
            )
        return Rotation.measure(self.model, self.layout)

    def tree(self) -> Tree:
        """An empty tree for this model."""
        return Tree(self.budget, splittable=self.splittable)

    # -- running --------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, runs: Sequence[Run]) -> Tensor:
        """Compute the new tokens of `runs`, write their KV to the tails and return logits.

        Returns
        -------
        Tensor [wanted, vocabulary]
            Logits after the last `wanted` new tokens of each row of each run, in order.
        """
        parts = [list(runs)] if self.splittable else _by_shape(runs)
        states: list[tuple[Tail, State]] = []
        logits = {id(run): part for group in parts for run, part in self._forward_group(group, states)}
        for tail, state in states:  # only now, so that a pass that failed can be tried again
            tail.set_state(state)
        for run in runs:
            run.tail.length += run.width
        wanted = [logits[id(run)] for run in runs if run.wanted]
        if not wanted:
            return torch.empty(0, self.model.config.get_text_config().vocab_size)
        return torch.cat(wanted) if len(wanted) > 1 else wanted[0]

    def _forward_group(self, runs: list[Run], states: list[tuple[Tail, State]]) -> list[tuple[Run, Tensor]]:
        plan = Plan(runs, self.device)
        ids = torch.tensor(plan.tokens, device=self.device)
        rows = [len(run.tokens) for run in runs]
        if self.splittable:  # flat: one row that holds the tokens of all rows
            grid, keep = ids[None], plan.wanted()
        else:  # states need the rows apart; all runs here have the same width
            width = runs[0].width
            grid, keep = ids.view(sum(rows), width), list(range(width - max(run.wanted for run in runs), width))
        cache = self._cache_for(runs)
        self._plan, self._lent = plan, []
        try:
            logits = self._call(grid, plan.positions, cache, torch.tensor(keep, dtype=torch.long))
        finally:
            self._plan, self._lent = None, []
        self.passes += 1
        self.tokens_computed += len(plan.positions)
        if self._slots:
            parts = split_states(cache.state(self._slots), rows)
            states += [(_tail(run), state) for run, state in zip(runs, parts, strict=True)]
        if not self.splittable:
            return [
                (run, part[:, part.shape[1] - run.wanted :].flatten(0, 1))
                for run, part in zip(runs, logits.split(rows), strict=True)
            ]
        return list(zip(runs, logits[0].split([len(run.tokens) * run.wanted for run in runs]), strict=True))

    def forward_watched(self, runs: Sequence[Run], watch: Watch, targets: Sequence[int]) -> tuple[Tensor, int]:
        """Like :meth:`forward`, for the target tokens only; `watch` may end the pass before the last layer.

        After a pass that ended early the tails are good for nothing but to be closed.

        Parameters
        ----------
        runs : sequence of Run
            One for models with recurrent states.
        watch : Watch
            Looks at the rows' last tokens, run by run and row by row.
        targets : sequence of int
            Token ids.

        Returns
        -------
        logits : Tensor [rows, targets], float32
            At the depth that was reached.
        layers : int
            Layers that were computed.

        Raises
        ------
        UnsupportedModelError
            If the model's head could not be found out.
        """
        if self.readout is None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} gives no readout of its middle layers, so no pass can end early: "
                "switch the layer exit off (exit='strict' or 'off')"
            )
        flat = Plan(runs, self.device).wanted() if self.splittable else None
        try:
            with self.readout.watched(watch, LastTokens(flat), targets):
                return self.forward(runs)[:, list(targets)].float(), self.depth
        except Settled as settled:
            self.passes += 1
            self.tokens_computed += sum(len(run.tokens) * run.width for run in runs)
            return settled.logits, settled.layer

    def _cache_for(self, runs: list[Run]) -> TreeCache:
        states = [state for run in runs if (state := _tail(run).state) is not None]
        length = max(run.bases[0].end + run.tail.length for run in runs)
        return TreeCache(self.kinds, length, self._slots, cat_states(states) if states else None)

    def _call(self, ids: Tensor, positions: list[int], cache: TreeCache, keep: Tensor) -> Tensor:
        """Call the model; `keep` are the positions of each row whose logits are returned."""
        arguments: dict[str, Any] = {
            "input_ids": ids.to(self.device),
            "position_ids": torch.tensor(positions, device=self.device).view(ids.shape),
            "cache": cache,
            "use_cache": True,
        }
        if "logits_to_keep" in self._takes:
            keep = keep.to(output_device(self.model))
            return self.model(**arguments, logits_to_keep=keep).logits  # type: ignore[no-any-return]
        logits = self.model(**arguments).logits
        return logits[:, keep.to(logits.device)]  # type: ignore[no-any-return]

    # -- attention ------------------------------------------------------------------------------

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """The function registered in transformers' `AttentionInterface`; shapes [batch, heads, tokens, width]."""
        if threading.get_ident() != self._thread:
            raise EngineError(
                "the model was called from another thread while an engine runs on it: "
                "ask through the reasoner, or close() it first"
            )
        layer = self._layer_of(module, key)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self._plan is None:
            self._seen.setdefault(layer, LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device))
            groups = query.shape[1] // key.shape[1]
            return value.transpose(1, 2).repeat_interleave(groups, 2).contiguous(), None  # one token sees itself
        if layer == module.layer_idx:
            self._write(layer, key, value)
        batch, heads, tokens, width = query.shape
        flat = query.transpose(1, 2).reshape(1, batch * tokens, heads, width)
        out = tree_attention(
            self._plan, layer, flat, scale=scale, window=self.kinds.windows[layer], softcap=softcap, sinks=s_aux
        )
        return out.view(batch, tokens, heads, -1), None

    def _layer_of(self, module: nn.Module, key: Tensor) -> int:
        """The layer whose KV is read: a layer that reuses another's (Gemma 4) is handed that layer's very tensor."""
        own = int(module.layer_idx)  # type: ignore[arg-type]
        if own in self.kinds.windows:
            if self.kinds.reusing:
                self._lent.append((own, key))
            return own
        return next(layer for layer, lent in self._lent if lent is key)

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        assert self._plan is not None
        first = 0
        for start, run in zip(self._plan.starts, self._plan.runs, strict=True):
            rows, width = len(run.tokens), run.width
            if key.shape[2] == rows and self.splittable:  # one new token for each row, and nothing else
                keys, values = key.transpose(0, 2), value.transpose(0, 2)
            elif self.splittable:  # flat: [1, heads, tokens, width]
                at, shape = slice(start, start + rows * width), (rows, width)
                keys, values = (t[0, :, at].unflatten(1, shape).transpose(0, 1) for t in (key, value))
            else:
                keys, values = key[first : first + rows], value[first : first + rows]
            first += rows
            _tail(run).write(layer, keys, values)


def _tail(run: Run) -> Tail:
    assert isinstance(run.tail, Tail)
    return run.tail


def _by_shape(runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs that a batch with recurrent states can hold: same width, all with or all without a past."""
    groups: dict[tuple[int, bool], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.width, _tail(run).state is None), []).append(run)
    return list(groups.values())
