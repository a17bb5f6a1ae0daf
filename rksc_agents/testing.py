"""A scripted model for your own tests: real engine, real strategies, no weights.

::

    from rksc_agents.testing import scripted_reasoner

    with scripted_reasoner({"What is 6 x 7?": {"It is 42.": 3, "It is 41.": 1}}) as reasoner:
        assert reasoner.reason("What is 6 x 7?", max_tokens=20).answer == "42"

The scripted model writes one of its answers, each as likely as its weight; a seed makes it repeatable,
temperature 0 takes the likeliest. It stores token ids where a real model stores keys and values, and
reads them back from there, so what it answers depends on the KV cache being right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rksc_agents.cache.budget import Budget
from rksc_agents.cache.store import LayerShape, Layout, Segment, Tail
from rksc_agents.cache.tree import Node, Tree
from rksc_agents.config import EngineConfig, Sampling
from rksc_agents.errors import ConfigError, RKSCError
from rksc_agents.model.exits import Watch
from rksc_agents.model.plan import Run
from rksc_agents.model.rotation import Rotation
from rksc_agents.model.text import TextCodec
from rksc_agents.reasoner import RKSCReasoner
from rksc_agents.reasoning import Strategy

Script = Mapping[str, str | Sequence[str] | Mapping[str, float]]
"""Per question its answer, several equally likely answers, or answers with weights."""

NextLogits = Callable[[tuple[int, ...]], Tensor]
"""Maps a sequence of tokens to logits [vocabulary] for the next one."""

_MARKS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class ScriptError(RKSCError):
    """The scripted model was asked something that its script does not know."""


def scripted_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per UTF-8 byte, markers for the roles, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(_MARKS))
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", chat_template=_TEMPLATE)


class ScriptedRunner:
    """Runs a function of the token sequence in place of a model; the engine takes it like any other runner.

    Parameters
    ----------
    next_logits : callable
        Maps the sequence so far to logits for the next token.
    vocabulary : int
        Number of tokens.
    budget : Budget
        Counts the stored token ids, 8 bytes per token.
    """

    splittable = True
    chunked = True
    shares = True
    retryable = True
    depth = 1
    readout = None
    quantization = None

    def __init__(self, next_logits: NextLogits, vocabulary: int, budget: Budget) -> None:
        self.next_logits = next_logits
        self.vocabulary = vocabulary
        self.budget = budget
        self.layout = Layout({0: LayerShape(1, 1, 1, torch.float32, torch.device("cpu"))})
        self.passes = 0
        self.tokens_computed = 0

    @property
    def token_bytes(self) -> int:
        return self.layout.token_bytes

    @contextmanager
    def attached(self) -> Iterator[None]:
        """There is no model to switch."""
        yield

    def tree(self) -> Tree:
        return Tree(self.budget)

    def most_bytes(self, ends: Sequence[int], most: int) -> int:
        return Tail.most_bytes(self.layout, len(ends), most)

    def tail(self, bases: Sequence[Node], most: int, promised: int) -> Tail:
        return Tail(self.layout, self.budget, len(bases), most, promised=promised)

    def forward(self, runs: Sequence[Run]) -> Tensor:
        logits = []
        for run in runs:
            assert isinstance(run.tail, Tail)
            ids = torch.tensor(run.tokens, dtype=torch.float32)[:, None, :, None]
            run.tail.write(0, ids, ids)
            for row in range(len(run.tokens)):
                stored = self._stored(run, row)
                logits += [self.next_logits(stored[: len(stored) - ahead]) for ahead in range(run.wanted)[::-1]]
        for run in runs:  # only now, so that a pass that failed can be tried again
            run.tail.length += run.width
            self.tokens_computed += run.width * len(run.tokens)
        self.passes += 1
        return torch.stack(logits) if logits else torch.empty(0, self.vocabulary)

    def rotation(self) -> Rotation:
        """Token ids do not turn with their position."""
        return Rotation({0: None})

    def forward_watched(self, runs: Sequence[Run], watch: Watch, targets: Sequence[int]) -> tuple[Tensor, int]:
        """There are no layers to stop at."""
        return self.forward(runs)[:, list(targets)], self.depth

    @staticmethod
    def _stored(run: Run, row: int) -> tuple[int, ...]:
        """The sequence as the KV cache has it."""
        assert isinstance(run.tail, Tail)
        own = run.tail.kv[0][0][row, 0, : run.tail.length + run.width, 0]
        if run.scattered is not None and run.positions is not None:
            placed = dict(zip(run.positions, own.tolist(), strict=True))
            placed |= dict(zip(run.scattered.positions, run.scattered.segment.kv[0][0][0, :, 0].tolist(), strict=True))
            own = torch.tensor([placed[at] for at in sorted(placed)])
        parts = [own]
        for node in reversed(run.bases[row].path()):
            assert isinstance(node.payload, Segment)
            parts.append(node.payload.kv[0][0][0, :, 0])
        return tuple(int(token) for token in torch.cat(parts[::-1]))

    def close(self) -> None:
        """Nothing to leave as it was."""


class _Script:
    """Logits of a model that writes the answers of a script."""

    def __init__(self, script: Script, tokenizer: PreTrainedTokenizerFast) -> None:
        self._ids = {mark: tokenizer.get_vocab()[mark] for mark in _MARKS}
        self._size = len(tokenizer)
        self._tokenizer = tokenizer
        self._answers = {question.strip(): self._weighted(answers) for question, answers in script.items()}

    def _weighted(self, answers: str | Sequence[str] | Mapping[str, float]) -> list[tuple[tuple[int, ...], float]]:
        if isinstance(answers, str):
            answers = [answers]
        pairs = list(answers.items()) if isinstance(answers, Mapping) else [(answer, 1.0) for answer in answers]
        if not all(weight > 0 for _, weight in pairs):
            raise ConfigError(f"the weights of {dict(pairs)} must all be above 0")
        return [(self._written(answer), float(weight)) for answer, weight in pairs]

    def _written(self, answer: str) -> tuple[int, ...]:
        return (*self._tokenizer.encode(answer, add_special_tokens=False), self._ids["<|end|>"])

    def __call__(self, tokens: tuple[int, ...]) -> Tensor:
        start = len(tokens) - tokens[::-1].index(self._ids["<|assistant|>"])
        written = tokens[start:]
        logits = torch.full((self._size,), -1e4)
        for answer, weight in self._answers_to(tokens[:start]):
            if len(answer) > len(written) and answer[: len(written)] == written:
                token = answer[len(written)]
                logits[token] = math.log(weight + (math.exp(logits[token]) if logits[token] > -1e4 else 0.0))
        if (logits == -1e4).all():
            logits[self._ids["<|end|>"]] = 0.0
        return logits

    def _answers_to(self, prompt: tuple[int, ...]) -> list[tuple[tuple[int, ...], float]]:
        start = len(prompt) - prompt[::-1].index(self._ids["<|user|>"])
        stop = prompt.index(self._ids["<|end|>"], start)
        question = str(self._tokenizer.decode(list(prompt[start:stop]))).strip()
        lines = f"\n{question}\n"  # instructions may follow a question, and results of tools come before it
        known = {lines.rfind(f"\n{each}\n"): each for each in sorted(self._answers, key=len)}
        if max(known, default=-1) < 0:
            listed = ", ".join(map(repr, self._answers)) or "nothing"
            raise ScriptError(f"the script has no answer to {question!r}; it knows {listed}")
        return self._answers[known[max(known)]]


def scripted_reasoner(
    script: Script,
    *,
    strategy: Strategy | str | None = None,
    sampling: Sampling | None = None,
    context: int = 4096,
    kv_budget: int = 2**24,
    **engine: Any,
) -> RKSCReasoner:
    """A reasoner on a scripted model.

    Parameters
    ----------
    script : mapping
        From a question (the last user message, or whole lines of it, of which the last that is known counts) to its
        answer, a list of equally likely answers, or a mapping of
        answers to weights.
    strategy, sampling
        As for :meth:`~rksc_agents.reasoner.RKSCReasoner.from_model`; the temperature is 1 unless given, so that the
        weights are the probabilities.
    context : int, default 4096
        The model's context in tokens; a token is one UTF-8 byte.
    kv_budget : int, default 16 MiB
        At 8 bytes a token.
    **engine
        Fields of :class:`~rksc_agents.config.EngineConfig`.

    Raises
    ------
    EngineError
        When asked, if the script does not know the question; the cause is a :class:`ScriptError`.
    """
    tokenizer = scripted_tokenizer()
    next_logits = _Script(script, tokenizer)
    return RKSCReasoner(
        lambda budget: ScriptedRunner(next_logits, len(tokenizer), budget),
        TextCodec(tokenizer),
        name="scripted",
        context=context,
        kv_limit=kv_budget,
        strategy=strategy,
        sampling=sampling if sampling is not None else Sampling(temperature=1.0),
        engine=EngineConfig(**engine),
        model_hash="scripted",
    )
