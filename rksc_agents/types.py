"""What goes in and what comes out: messages and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["eos", "stop", "length", "cancelled", "unsure"]
"""Why a branch ended: the model ended it, a stop text, max_tokens or the context, the vote was decided, its
confidence fell too low."""

SharingMode = Literal["exact", "aligned", "semantic"]
"""How a branch with a prompt of its own takes KV from the first prompt (ASKS)."""

Messages = Sequence[Mapping[str, Any]]
"""A conversation: mappings with "role" and "content", as chat templates take them."""

Prompt = str | Messages
"""A question (one user turn) or a conversation."""


class Rendered(str):
    """A prompt as the model reads it: no chat template is applied, and control tokens in it are control tokens.

    Do not build one of texts that you do not trust.

    Examples
    --------
    >>> prompt = Rendered("<|user|>Q<|end|><|assistant|>")
    >>> reasoner.reason(prompt, strategy="direct").text
    'The answer is 4.'
    """

    __slots__ = ()


class Record(BaseModel):
    """A frozen result object that prints as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SharingRecord(Record):
    """What a branch's prompt took from KV that was there, and what was computed for it (ASKS).

    Attributes
    ----------
    mode : str
        "exact", "aligned" or "semantic".
    sigma : float or None
        Weighted cosine similarity of hidden states to those of the first prompt; 1.0 for equal tokens, None where it
        was not measured.
    reused, recomputed : int
        Tokens whose KV was taken, and whose KV was computed, for the prompt that the branch goes on from: its own,
        or the first one where mode "semantic" took that instead. Their sum is that prompt's length. What was computed
        for a prompt counts for the first branch on it.
    kl, agreement : float or None
        With ``audit=True``: mean KL divergence in nats from exact computation over the branch's first tokens, and the
        share of them with the same likeliest token. 0 and 1 where the branch was computed exactly.

    Examples
    --------
    >>> result.branches[1].sharing.mode
    'exact'
    """

    mode: SharingMode = "exact"
    sigma: float | None = None
    reused: int = 0
    recomputed: int = 0
    kl: float | None = None
    agreement: float | None = None


class Verdict(Record):
    """What a verifier made of a branch, and what that took (CGEE).

    Attributes
    ----------
    score : float or None
        How right the branch seems, in [0, 1]; None if verification was skipped, or found no room in the context.
    skipped : bool
        Level 1 found one branch decisively confident, so nothing was verified.
    exit_layer : int or None
        Level 2: the layer after which the verdict had settled, counted from 1; None at full depth.
    layers : int
        Layers that were computed for it; 0 where no layer of the model was.
    tokens_computed : int
        Tokens computed for it alone.
    entropies : dict of int to float
        Level 2: by layer, counted from 1, the entropy in nats of YES against NO as that layer saw it, up to the layer
        at which the pass ended; 0 is sure, ln 2 undecided. Empty where nobody looked.

    Examples
    --------
    >>> Verdict(score=0.9).skipped
    False
    """

    score: float | None = None
    skipped: bool = False
    exit_layer: int | None = None
    layers: int = 0
    tokens_computed: int = 0
    entropies: dict[int, float] = Field(default_factory=dict)


class ToolCall(Record):
    """A call of a tool that a model asked for.

    Attributes
    ----------
    name : str
        The tool's name, one of those that were offered.
    arguments : dict
        Its arguments.

    Examples
    --------
    >>> ToolCall(name="weather", arguments={"city": "Rome"}).name
    'weather'
    """

    name: str
    arguments: dict[str, Any]


class InvalidToolCall(Record):
    """What looks like a call and is none.

    Attributes
    ----------
    text : str
        What the model wrote.
    error : str
        What is wrong with it.
    name : str or None
        The tool that it named, where it did.

    Examples
    --------
    >>> InvalidToolCall(text="weather(", error="no JSON").name is None
    True
    """

    text: str
    error: str
    name: str | None = None


class Branch(Record):
    """One finished line of reasoning.

    Attributes
    ----------
    text : str
        What the branch wrote, without its thinking and without tool calls.
    thinking : str
        The text between thinking markers such as ``<think>``; empty for other models.
    tokens : tuple of int
        Generated token ids.
    logprobs : tuple of float
        Log-probability of each token under the model (before temperature and filters).
    confidence : float
        In the measure that the strategy uses; the mean top-1 probability by default.
    finish_reason : str
        "eos", "stop", "length", "cancelled" or "unsure".
    answer : str or None
        The extracted answer, None where there is none; of tool calls and JSON the canonical form, as it is voted on.
    tool_calls, invalid_tool_calls : tuple
        What the branch called, in its order, and what looks like a call and is none.
    depth : int
        Steps before it: 0 for a branch that starts at the prompt.
    parent : int or None
        Index of the branch that it goes on from; None if it starts at the prompt.
    sharing : SharingRecord
        What its prompt took from KV that was there.
    verdict : Verdict or None
        What the verifier made of it; None where nothing was to be verified.

    Examples
    --------
    >>> result.branches[0].text
    'The answer is 4.'
    >>> result.branches[0].finish_reason
    'eos'
    """

    text: str
    thinking: str = ""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    confidence: float
    finish_reason: FinishReason
    answer: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    invalid_tool_calls: tuple[InvalidToolCall, ...] = ()
    depth: int = 0
    parent: int | None = None
    sharing: SharingRecord = SharingRecord()
    verdict: Verdict | None = None


class Vote(Record):
    """One candidate answer with its support.

    Attributes
    ----------
    answer : str
        The answer as the first branch that gave it wrote it.
    weight : float
        Sum of the weights of its branches (their count in a majority vote).
    branches : tuple of int
        Indices of the branches that gave it.

    Examples
    --------
    >>> result.votes[0].answer, result.votes[0].branches
    ('4', (0, 1, 2))
    """

    answer: str
    weight: float
    branches: tuple[int, ...]


class Usage(Record):
    """Tokens counted.

    Attributes
    ----------
    prompt_tokens, prompt_tokens_computed, prompt_tokens_reused : int
        Of prompts: all of them, those that were computed, and those whose KV was there.
    completion_tokens : int
        Of all branches.
    completion_tokens_winner : int
        Of the winning line.
    completion_tokens_thinking : int
        Those of the winning line that were written inside thinking markers, these included.

    Examples
    --------
    >>> result.usage.prompt_tokens == result.usage.prompt_tokens_computed + result.usage.prompt_tokens_reused
    True
    """

    prompt_tokens: int
    prompt_tokens_computed: int
    prompt_tokens_reused: int
    completion_tokens: int
    completion_tokens_winner: int
    completion_tokens_thinking: int = 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens that are no part of the answer: those of the other branches, and the winner's thinking."""
        return self.completion_tokens - self.completion_tokens_winner + self.completion_tokens_thinking


class KVUsage(Record):
    """KV cache of one request.

    Attributes
    ----------
    peak_bytes : int
        Most bytes of KV the request's branches held at once, each shared run counted once.
    bytes_if_copied : int
        What the same branches would have held at that moment with a copy of the prefix each.
    tokens_shared : int
        Token positions that were read from a shared run instead of a copy, at that moment.
    evicted : int
        Nodes evicted while the request ran.
    recomputed : int
        Tokens computed again because their KV had been evicted.

    Examples
    --------
    >>> result.kv.peak_bytes < result.kv.bytes_if_copied
    True
    """

    peak_bytes: int = 0
    bytes_if_copied: int = 0
    tokens_shared: int = 0
    evicted: int = 0
    recomputed: int = 0


class VerificationUsage(Record):
    """What verification took, and what early exit spared (CGEE).

    Attributes
    ----------
    verifier : str or None
        Name of the verifier; None where the strategy did not verify.
    exit : str
        Where the thresholds come from: "off", "strict", "paper", "certificate" or "custom".
    verified, skipped : int
        Branches that were verified, and branches that level 1 spared.
    exited : int
        Verified branches whose verdict had settled before the last layer.
    tokens_computed : int
        Tokens computed for verdicts.
    layers, layers_full : int
        Layers of the reasoner's own model computed for verdicts, summed over the branches, and what full depth would
        have taken.

    Examples
    --------
    >>> result.verification.verified
    0
    """

    verifier: str | None = None
    exit: str = "off"
    verified: int = 0
    skipped: int = 0
    exited: int = 0
    tokens_computed: int = 0
    layers: int = 0
    layers_full: int = 0


class Quantization(Record):
    """Weights that are rounded to 8-bit integers (``EngineConfig(int8=True)``), and what that changes.

    Attributes
    ----------
    layers : int
        Linear layers that are.
    divergence : float
        Mean Kullback-Leibler divergence from the plain model's distribution of the next token, in nats, on a passage
        of text when the model was loaded.
    agreement : float
        Share of that passage's tokens after which both expect the same token most.

    Examples
    --------
    >>> result.quantization is None  # nothing was rounded
    True
    """

    layers: int
    divergence: float
    agreement: float


class Timings(Record):
    """Seconds of wall-clock time.

    Attributes
    ----------
    queue_s : float
        From the question to the first step that worked for it.
    prefill_s, decode_s, verify_s : float
        In which prompts, branches and verdicts were waited for; what was waited for at once counts each time.
    total_s : float
        From the question to the answer.

    Examples
    --------
    >>> result.timings.total_s >= result.timings.decode_s
    True
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0
