"""Drawing the next token of every row of a batch, each row with its own settings, history and generator."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rksc_agents.config import Sampling
from rksc_agents.errors import ConfigError, EngineError
from rksc_agents.model.filters import draw, penalized, row_sum, wide_dtype


class TokenHistory:
    """The distinct tokens of a prompt and its branch, for the repetition penalty.

    Parameters
    ----------
    tokens : iterable of int, default ()
        Tokens seen so far; repeats are kept once.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._seen: dict[int, None] = dict.fromkeys(tokens)
        self._ids: Tensor | None = None

    def __len__(self) -> int:
        return len(self._seen)

    def __contains__(self, token: int) -> bool:
        return token in self._seen

    def add(self, token: int) -> None:
        """Note that `token` occurred; noting it twice changes nothing."""
        if token not in self._seen:
            self._seen[token] = None
            self._ids = None

    def ids(self) -> Tensor:
        """Return the distinct tokens, int64, in order of first occurrence."""
        if self._ids is None:
            self._ids = torch.tensor(list(self._seen), dtype=torch.int64)
        return self._ids

    def fork(self) -> TokenHistory:
        """Return a copy that goes its own way."""
        return TokenHistory(self._seen)


@dataclass(slots=True)
class RowState:
    """What one row of the batch draws with.

    Attributes
    ----------
    sampling : Sampling
        The row's settings.
    generator : torch.Generator
        The row's own generator on the CPU; one number is taken from it per sampled token, none per greedy one.
    history : TokenHistory
        Tokens of the prompt and the branch; read and extended only where the repetition penalty is not 1.
    """

    sampling: Sampling
    generator: torch.Generator
    history: TokenHistory = field(default_factory=TokenHistory)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token per row, in the order of the rows.

    Attributes
    ----------
    tokens : list of int
        The tokens.
    logprobs : list of float
        Their log-probabilities under the softmax of the raw logits: no penalty, temperature or filter.
    """

    tokens: list[int]
    logprobs: list[float]


class Sampler:
    """Draws the next token of every row of a batch.

    Rows with equal settings are handled together. What a row draws depends on its logits, settings, history
    and generator alone, never on the other rows.
    """

    @staticmethod
    def generator(seed: int, branch: int) -> torch.Generator:
        """Return the generator of branch number `branch` of a request with this `seed`.

        The pair is hashed, so neighbouring seeds and branches share nothing.
        """
        digest = hashlib.blake2b(f"{seed}/{branch}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little"))

    def sample(self, logits: Tensor, rows: Sequence[RowState], allowed: Tensor | None = None) -> Drawn:
        """Draw one token for each row.

        The filters come in the order of transformers: repetition penalty, temperature, top_k, top_p, min_p.
        A token is drawn by inverse CDF over the token ids in ascending order; greedy rows take the first of
        equal maxima. Under a repetition penalty the drawn token enters the row's history.

        Parameters
        ----------
        logits : Tensor, [rows, vocabulary]
            The model's raw logits in any float dtype; they are left as they are.
        rows : sequence of RowState
            One for each row of `logits`.
        allowed : Tensor or None, [rows, vocabulary], bool
            The tokens that may be drawn, at least one in each row; None for all.

        Returns
        -------
        Drawn

        Raises
        ------
        EngineError
            If a row of logits holds NaN or +inf, or nothing but -inf. No generator has moved then.
        """
        if logits.ndim != 2 or logits.shape[0] != len(rows):
            raise ConfigError(
                f"logits of shape {tuple(logits.shape)} for {len(rows)} rows: give [rows, vocabulary], one row each"
            )
        if not rows:
            return Drawn([], [])
        logits = logits.detach().float()
        normalizer = _log_sum_exp(logits)
        tokens = torch.empty((len(rows), 1), dtype=torch.int64, device=logits.device)
        for members in _groups(rows):
            where = torch.tensor(members, device=logits.device)
            part = logits if len(members) == len(rows) else logits[where]
            if allowed is not None:
                part = part.masked_fill(~allowed[where], float("-inf"))
            tokens[where, 0] = _draw_group(part, [rows[member] for member in members])
        drawn = Drawn(tokens.squeeze(-1).tolist(), (logits.gather(-1, tokens) - normalizer).squeeze(-1).tolist())
        for row, token in zip(rows, drawn.tokens, strict=True):
            if row.sampling.repetition_penalty != 1.0:
                row.history.add(token)
        return drawn


def _draw_group(logits: Tensor, rows: Sequence[RowState]) -> Tensor:
    sampling = rows[0].sampling
    if sampling.repetition_penalty != 1.0:
        logits = penalized(logits, sampling.repetition_penalty, [row.history.ids() for row in rows])
    if sampling.temperature == 0.0:
        return logits.argmax(-1)  # the first of equal maxima
    dtype = wide_dtype(logits)
    uniform = torch.cat([torch.rand(1, generator=row.generator, dtype=dtype) for row in rows])
    return draw(logits, sampling, uniform.to(logits.device))


def _groups(rows: Sequence[RowState]) -> list[list[int]]:
    groups: dict[tuple[float, ...], list[int]] = {}
    for index, row in enumerate(rows):
        s = row.sampling
        key: tuple[float, ...] = (s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _log_sum_exp(logits: Tensor) -> Tensor:
    """Return the log of each row's sum of exponentials, [rows, 1], or raise where it is no finite number."""
    top = logits.amax(-1, keepdim=True)
    result = top + row_sum((logits - top).exp_()).log()
    bad = (~result.isfinite()).flatten().nonzero().flatten().tolist()
    if bad:
        raise EngineError(
            f"the model's logits of row {bad[0]} hold NaN or +inf, or only -inf (largest {top[bad[0]].item()}): "
            "load the model with dtype float32 or bfloat16 if it runs in float16, and check its weights"
        )
    return result


def recommended_sampling(model: PreTrainedModel) -> Sampling:
    """Return the settings that the model's generation config gives for sampling; the defaults where it gives none."""
    given = model.generation_config
    if given is None or not given.do_sample:
        return Sampling()
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return Sampling(**{name: value for name in names if (value := getattr(given, name, None)) is not None})
