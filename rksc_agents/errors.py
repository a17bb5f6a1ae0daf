"""Every error this package raises on purpose.

::

    RKSCError
    ├── ConfigError            a value outside its range, an unknown argument or name   (also ValueError)
    ├── PromptTooLongError     the prompt does not fit the model's context              (also ValueError)
    ├── ModelLoadError         the model's files are missing, corrupt or unsuitable
    │   └── ConversionError    a converted copy could not be written (a full disk, say)
    ├── UnsupportedModelError  the model's architecture cannot be run
    ├── KVBudgetError          a request can never fit the KV budget
    ├── EngineClosedError      a call after ``close()``
    └── EngineError            the model itself failed inside a step

Each message names the value, the allowed range and the way out.
"""

from __future__ import annotations


class RKSCError(Exception):
    """Root of all errors of this package.

    Examples
    --------
    >>> try:
    ...     reasoner.reason("Q" * 10_000)
    ... except RKSCError as error:
    ...     print(type(error).__name__)
    PromptTooLongError
    """


class ConfigError(RKSCError, ValueError):
    """A value is outside its range, or an argument or name is unknown.

    Examples
    --------
    >>> try:
    ...     Sampling(temperature=-1)
    ... except ConfigError as error:
    ...     print(error)
    Sampling.temperature = -1: Input should be greater than or equal to 0
    """


class PromptTooLongError(RKSCError, ValueError):
    """The prompt, with room for one new token, does not fit the model's context.

    Attributes
    ----------
    tokens : int
        Length of the prompt.
    limit : int
        Length of the model's context.

    Examples
    --------
    >>> PromptTooLongError(tokens=9000, limit=8192).tokens
    9000
    """

    def __init__(self, tokens: int, limit: int) -> None:
        self.tokens = tokens
        self.limit = limit
        super().__init__(
            f"the prompt has {tokens} tokens and the model's context is {limit}, of which at least one must be left "
            f"for the answer: shorten the prompt to {limit - 1} tokens or fewer, or load a model with a longer context"
        )


class ModelLoadError(RKSCError):
    """The model's files are missing, corrupt or unsuitable.

    Examples
    --------
    >>> issubclass(ModelLoadError, RKSCError)
    True
    """


class ConversionError(ModelLoadError):
    """A converted copy of the weights could not be written; nothing half-written is left.

    Examples
    --------
    >>> issubclass(ConversionError, ModelLoadError)
    True
    """


class UnsupportedModelError(RKSCError):
    """The model's architecture cannot be run.

    Examples
    --------
    >>> issubclass(UnsupportedModelError, RKSCError)
    True
    """


class KVBudgetError(RKSCError):
    """A request can never fit the KV budget.

    Attributes
    ----------
    needed : int
        Bytes of KV the request needs at its peak.
    limit : int
        The budget, in bytes.

    Examples
    --------
    >>> KVBudgetError(needed=2048, limit=1024).limit
    1024
    """

    def __init__(self, needed: int, limit: int) -> None:
        self.needed = needed
        self.limit = limit
        super().__init__(
            f"this request needs up to {needed:,} bytes of KV cache and the budget is {limit:,}: raise kv_budget, "
            "or lower branches, max_tokens or the prompt's length"
        )


class EngineClosedError(RKSCError):
    """The engine was closed; make a new reasoner.

    Examples
    --------
    >>> issubclass(EngineClosedError, RKSCError)
    True
    """


class EngineError(RKSCError):
    """The model failed inside a step; the cause is chained.

    Examples
    --------
    >>> issubclass(EngineError, RKSCError)
    True
    """
