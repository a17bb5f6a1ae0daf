"""Settings as small frozen objects that check themselves."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rksc_agents.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The model that runs where none is named."""


class Config(BaseModel):
    """A frozen value object. A bad or unknown field raises :class:`ConfigError` at construction."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(self._explain(error)) from None

    def replace(self, **changes: Any) -> Self:
        """Return a copy with `changes` made, checked like a new object."""
        return type(self)(**{**self._fields_set_here(), **changes})

    def _fields_set_here(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields}

    @classmethod
    def _explain(cls, error: ValidationError) -> str:
        known = ", ".join(sorted(cls.model_fields))
        lines = []
        for item in error.errors():
            name = ".".join(str(part) for part in item["loc"]) or cls.__name__
            if item["type"] == "extra_forbidden":
                lines.append(f"{cls.__name__} has no argument {name!r}; it takes {known}")
            else:
                lines.append(f"{cls.__name__}.{name} = {item['input']!r}: {item['msg']}")
        return "; ".join(lines)


class Sampling(Config):
    """How tokens are drawn.

    Parameters
    ----------
    temperature : float, default 0.7
        Divides the logits; 0 is greedy. Range 0 to 100.
    top_k : int, default 0
        Keep the `top_k` likeliest tokens; 0 keeps all.
    top_p : float, default 1.0
        Keep the smallest set of tokens whose probability reaches `top_p`. Range (0, 1].
    min_p : float, default 0.0
        Drop tokens less likely than `min_p` times the likeliest. Range [0, 1).
    repetition_penalty : float, default 1.0
        Divides positive and multiplies negative logits of tokens already in the prompt or the
        branch (Keskar et al. 2019). Range (0, 100]; 1 is off.
    max_tokens : int, default 256
        Tokens a branch may generate, at least 1.
    stop : tuple of str, default ()
        A branch ends before the first of these texts; the text itself is not returned.
    seed : int, default 0
        Branch `b` of a request draws from its own generator, seeded from `seed` and `b`.
    ignore_eos : bool, default False
        Generate `max_tokens` tokens whatever they are (for benchmarks).

    Examples
    --------
    >>> Sampling(temperature=0).replace(max_tokens=32).max_tokens
    32
    """

    temperature: float = Field(default=0.7, ge=0.0, le=100.0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=100.0)
    max_tokens: int = Field(default=256, ge=1)
    stop: tuple[str, ...] = ()
    seed: int = Field(default=0, ge=0, lt=2**63)
    ignore_eos: bool = False

    def __init__(self, **fields: Any) -> None:
        if isinstance(fields.get("stop"), str):  # a bare text would be taken apart into letters
            fields["stop"] = (fields["stop"],)
        super().__init__(**fields)
        if "" in self.stop:
            raise ConfigError("Sampling.stop holds an empty text, which would stop at once: remove it")


class Sharing(Config):
    """What branches with prompts of their own take from the first prompt's KV (ASKS).

    Parameters
    ----------
    mode : "exact", "aligned" or "semantic", default "exact"
        "exact" shares equal beginnings, without loss. "aligned" also takes runs of equal tokens from other positions,
        their keys rotated to the new ones. "semantic" lets a branch go on from the first prompt instead of its own
        where the gate says that they mean the same. Both lose something. Verification never uses KV that "aligned"
        made; a branch that "semantic" let through is one of the first prompt, and verified as such.
    first : int, default 20
        "aligned": tokens at the beginning of each run that are computed all the same; numbers always are.
    shortest : int, default 4
        "aligned": tokens that a run has at least.
    tau : float, default 0.98
        "semantic": similarity from which a branch takes the first prompt's KV; 0 to 1.
    alpha : float, default 1.5
        "semantic": how much more later layers count, w_l = exp(alpha l / L); 0 counts all alike.
    gate : "sigma", "early-sigma" or "tokens", default "sigma"
        "semantic": the paper's similarity over all layers, the same over the first quarter of them, which computes no
        more than that, or the share of tokens that the prompts have in common, which computes nothing.
    audit : bool, default False
        Compute each such branch exactly as well, and report how far the shared computation is from that.

    Examples
    --------
    >>> Sharing(mode="aligned", audit=True).first
    20
    """

    mode: Literal["exact", "aligned", "semantic"] = "exact"
    first: int = Field(default=20, ge=0)
    shortest: int = Field(default=4, ge=1)
    tau: float = Field(default=0.98, ge=0.0, le=1.0)
    alpha: float = Field(default=1.5, ge=0.0, le=100.0)
    gate: Literal["sigma", "early-sigma", "tokens"] = "sigma"
    audit: bool = False


class EngineConfig(Config):
    """How the engine runs.

    Parameters
    ----------
    kv_budget : int or float or None, default None
        Bytes the KV cache may hold; a float in (0, 1) is that share of the memory free when the
        engine starts. None is a quarter of it (2 GiB where the system does not tell).
    prefill_chunk : int, default 512
        Prompt tokens computed per step at most, so that a long prompt does not stall running rows.
    max_rows : int, default 256
        Branches that decode at once over all requests; more wait their turn.
    fast_linears : {"auto", True, False}, default "auto"
        Faster float32 linear layers on the CPU: "auto" packs the shapes, and multiplies in panels, where a
        measurement of a few seconds says it is quicker; True packs all; False leaves them alone.
    int8 : bool, default False
        Round the weights of float32 linear layers on the CPU to 8-bit integers: a quarter of the bytes per step, and
        lossy. It is quicker for few branches: see docs/performance.md. What it changes is measured when the model is
        loaded, and every result tells it as `quantization`.
    compile : bool, default False
        Compile the feed-forward blocks with `torch.compile`.

    Examples
    --------
    >>> EngineConfig(kv_budget=2**30).max_rows
    256
    """

    kv_budget: int | float | None = None
    prefill_chunk: int = Field(default=512, ge=1)
    max_rows: int = Field(default=256, ge=1)
    fast_linears: Literal["auto"] | bool = "auto"
    int8: bool = False
    compile: bool = False

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        budget = self.kv_budget
        if budget is not None and (budget <= 0 or (isinstance(budget, float) and budget >= 1)):
            raise ConfigError(
                f"EngineConfig.kv_budget = {budget!r}: give a positive number of bytes as an int, "
                "a share of the free memory as a float between 0 and 1, or None for a quarter of it"
            )
