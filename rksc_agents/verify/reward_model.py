"""Verification by a reward model: a second Hugging Face model whose head says how good an answer, or each step, is."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rksc_agents.engine.session import Session
from rksc_agents.errors import ConfigError
from rksc_agents.model.device import checked_device
from rksc_agents.model.exits import ExitRule
from rksc_agents.model.protocol import context_length, vocabulary_size
from rksc_agents.types import Verdict
from rksc_agents.verify.reward_loading import head_of, load_reward_model
from rksc_agents.verify.reward_text import Kind, Per, Row, Writer
from rksc_agents.verify.verifier import Claim

Aggregate = Literal["last", "min", "mean", "product"]

_AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = MappingProxyType(
    {
        "last": lambda scores: scores[-1],
        "min": min,
        "mean": lambda scores: math.fsum(scores) / len(scores),
        "product": math.prod,
    }
)
_OPTIONS = ("per", "aggregate", "separator", "positive", "batch_size", "max_length", "name")


class RewardModelVerifier:
    """Asks a reward model about each claim.

    ::

        RewardModelVerifier.from_pretrained("owner/reward-model")
        RewardModelVerifier.from_pretrained("owner/process-reward-model", per="step", aggregate="min")

    The question and the claim's text are written as the reward model's own chat template writes a finished
    conversation; without a template as a pair of texts, or joined by a blank line where the tokenizer has no separator
    token. What they spell never becomes a control token.

    Parameters
    ----------
    model : PreTrainedModel
        With a sequence- or a token-classification head, in evaluation mode.
    tokenizer : PreTrainedTokenizerBase
        The reward model's own.
    per : str, default "answer"
        "answer" scores the whole text, "step" each step of it.
    aggregate : str, default "last"
        "last", "min", "mean" or "product": the claim's score, made of those of its steps.
    separator : str, default "\\n"
        What ends a step. Steps of nothing but white space do not count.
    positive : int or None, default None
        The label that means right; the last one where it is None.
    batch_size : int, default 8
        Rows per forward pass.
    max_length : int or None, default None
        Most tokens of a row; what the model takes where it is None. Nothing is cut off: a longer row is an error.
    name : str or None, default None
        The name in results; "reward-model:" and where the model comes from where it is None.

    Raises
    ------
    ConfigError
        If a value is outside its range, or the model has no such head or is in training mode.

    Notes
    -----
    One label is read by the sigmoid, more by the softmax.

    A sequence head is read where transformers reads it for a row on its own, whatever the row is batched with: at the
    last token that is not the config's padding token (decoders), or at the first one (encoders). With ``per="step"``
    each prefix of the text that ends with a step is a row.

    A token head reads one row per claim, each step tokenized on its own with a separator after it, as such models are
    trained, and scored at its last token; with ``per="answer"`` the last step counts alone.

    Examples
    --------
    >>> verifier = RewardModelVerifier("org/reward-model")  # doctest: +SKIP
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        per: Per = "answer",
        aggregate: Aggregate = "last",
        separator: str = "\n",
        positive: int | None = None,
        batch_size: int = 8,
        max_length: int | None = None,
        name: str | None = None,
    ) -> None:
        kind = head_of(model)
        labels = int(model.config.num_labels or 1)
        longest = min(context_length(model), int(tokenizer.model_max_length or 10**9))
        if per not in {"answer", "step"}:
            raise ConfigError(f"per = {per!r}: use 'answer' or 'step'")
        if aggregate not in _AGGREGATES:
            raise ConfigError(f"aggregate = {aggregate!r}: use one of {', '.join(_AGGREGATES)}")
        if not isinstance(separator, str) or not separator:
            raise ConfigError(f"separator = {separator!r}: give the text that ends a step, such as '\\n'")
        _check_whole("positive", labels - 1 if positive is None else positive, 0, labels - 1)
        _check_whole("batch_size", batch_size, 1, None)
        _check_whole("max_length", longest if max_length is None else max_length, 1, longest)
        _check_mode(model)
        self.name = f"reward-model:{model.name_or_path or type(model).__name__}" if name is None else name
        self._model = model
        self._kind = kind
        self._per = per
        self._aggregate = _AGGREGATES[aggregate]
        self._positive = labels - 1 if positive is None else positive
        self._batch_size = batch_size
        self._longest = longest if max_length is None else max_length
        self._writer = Writer(tokenizer, separator)
        self._lock = threading.Lock()
        config = model.config.get_text_config()
        self._layers = int(config.num_hidden_layers)
        self._pad: int | None = config.pad_token_id
        head = getattr(model, "score", None)  # so decoders name it
        self._head = head if isinstance(head, nn.Linear) and self._kind == "sequence" else None
        self._caches = "use_cache" in inspect.signature(model.forward).parameters

    @classmethod
    def from_model(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Self:
        """Use a loaded model; the options are the parameters of the class."""
        return cls(model, tokenizer, **options)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        kind: Literal["auto"] | Kind = "auto",
        dtype: torch.dtype | str | None = None,
        device: str | torch.device | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a reward model and its tokenizer.

        Parameters
        ----------
        model : str or Path
            A hub id or a local folder.
        kind : str, default "auto"
            The head: "sequence", "token", or what the config's architectures say.
        dtype : torch.dtype or str or None, default None
            The weights' dtype; None is float32 on the CPU, else what suits the device.
        device : str or torch.device or None, default None
            Where the model runs; None is CUDA where present, else the CPU.
        **kwargs
            The parameters of the class, and what transformers' `from_pretrained` takes, such as `revision`;
            `trust_remote_code` is False and `use_safetensors` True unless given.

        Raises
        ------
        ConfigError
            If an argument is unknown or outside its range.
        ModelLoadError
            If the files are missing, damaged, or have no such head.
        UnsupportedModelError
            If transformers has no such head for the architecture.
        """
        options = {"name": f"reward-model:{model}"} | {key: kwargs[key] for key in _OPTIONS if key in kwargs}
        given = {key: value for key, value in kwargs.items() if key not in options}
        loaded, tokenizer = load_reward_model(model, kind, checked_device(device), dtype, given)
        return cls.from_model(loaded, tokenizer, **options)

    async def verify(self, session: Session, claims: Sequence[Claim], exit_rule: ExitRule | None) -> list[Verdict]:
        """Score the claims in another thread; `exit_rule` is for the reasoner's own model and is not used.

        Raises
        ------
        ConfigError
            If a claim is too long for the reward model, or a score is no number.
        """
        return await session.call(self._judge, list(claims))

    def _judge(self, claims: Sequence[Claim]) -> list[Verdict]:
        written = [self._writer.rows(claim, self._kind, self._per) for claim in claims]
        rows = [row for of_claim in written for row in of_claim]
        longest = max((len(row.tokens) for row in rows), default=0)
        if longest > self._longest:
            raise ConfigError(
                f"a claim with its question has {longest} tokens for {self.name}, and {self._longest} is the limit: "
                "lower max_tokens, shorten the question, or use a reward model with a longer context"
            )
        scores = iter(self._score(rows))
        verdicts = []
        for of_claim in written:
            steps = [score for _ in of_claim for score in next(scores)]
            if not all(map(math.isfinite, steps)):
                raise ConfigError(f"{self.name} gives the scores {steps}: load it with dtype=torch.float32")
            tokens = sum(len(row.tokens) for row in of_claim)
            verdicts.append(Verdict(score=self._aggregate(steps), layers=self._layers, tokens_computed=tokens))
        return verdicts

    @torch.inference_mode()
    def _score(self, rows: Sequence[Row]) -> list[list[float]]:
        """The scores at each row's ends, in order."""
        # Rows of like length go together. Of models that read the head themselves, decoders refuse several rows where
        # the config names no padding token.
        order = sorted(range(len(rows)), key=lambda k: len(rows[k].tokens))
        alone = self._kind == "sequence" and self._head is None and self._pad is None
        size = 1 if alone else self._batch_size
        scores: list[list[float]] = [[] for _ in rows]
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            with self._lock:
                _check_mode(self._model)
                logits = self._logits([rows[k] for k in batch])
            for k, labels in zip(batch, logits, strict=True):
                one, values = labels.shape[-1] == 1, labels.float()
                scores[k] = (values.sigmoid()[:, 0] if one else values.softmax(-1)[:, self._positive]).tolist()
        return scores

    def _logits(self, rows: Sequence[Row]) -> list[Tensor]:
        """Logits [ends, labels] of each row; rows are padded on the right."""
        model = self._model
        width = max(len(row.tokens) for row in rows)
        pad = self._pad if self._pad is not None and 0 <= self._pad < vocabulary_size(model) else 0

        def padded(values: Sequence[Sequence[int]], filler: int) -> Tensor:
            filled = [[*row, *[filler] * (width - len(row))] for row in values]
            return torch.tensor(filled, device=model.device)

        inputs: dict[str, Any] = {
            "input_ids": padded([row.tokens for row in rows], pad),
            "attention_mask": padded([[1] * len(row.tokens) for row in rows], 0),
        }
        if self._writer.segmented:
            inputs["token_type_ids"] = padded([row.segments for row in rows], 0)
        if self._caches:
            inputs["use_cache"] = False
        if self._kind == "token":
            logits = model(**inputs).logits
            return [logits[k, list(row.ends)] for k, row in enumerate(rows)]
        if self._head is None:
            return list(model(**inputs).logits[:, None])
        hidden = model.base_model(**inputs)[0]
        at = [_last(row.tokens, self._pad) for row in rows]  # never in the padding, nor told from it by its tokens
        return list(self._head(hidden[range(len(rows)), at])[:, None])


def _last(tokens: Sequence[int], pad: int | None) -> int:
    """Where a decoder's head is read: at the last token that is not `pad`."""
    return next((k for k in reversed(range(len(tokens))) if tokens[k] != pad), 0)


def _check_whole(name: str, value: int, least: int, most: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        allowed = f"from {least}" if most is None else f"from {least} to {most}, which is all that the model has"
        raise ConfigError(f"{name} = {value!r}: give a whole number {allowed}")


def _check_mode(model: PreTrainedModel) -> None:
    if model.training:
        raise ConfigError("the reward model is in training mode, so its scores would be random: call model.eval()")
