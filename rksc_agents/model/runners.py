"""Choosing how a model is run: on the KV tree, or with a cache per branch where the tree would be wrong."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import closing

import torch
from transformers import PreTrainedModel

from rksc_agents.cache.budget import Budget
from rksc_agents.config import EngineConfig
from rksc_agents.errors import ConfigError, UnsupportedModelError
from rksc_agents.model.plan import Run
from rksc_agents.model.private_runner import PrivateRunner
from rksc_agents.model.protocol import context_length, vocabulary_size
from rksc_agents.model.runner import TreeRunner
from rksc_agents.model.tree_cache import LayerKinds


class PerBranchWarning(UserWarning):
    """The model runs with one KV cache per branch, so its branches share nothing but the prefill.

    Examples
    --------
    >>> import warnings
    >>> warnings.simplefilter("error", PerBranchWarning)  # doctest: +SKIP
    """


def make_runner(
    model: PreTrainedModel, budget: Budget, config: EngineConfig | None = None, sample: Sequence[int] = range(32)
) -> TreeRunner | PrivateRunner:
    """The runner for `model`: on the tree where that gives the model's own logits, else with a cache per branch.

    What `config` asks for to make the model faster is undone by the runner's ``close()``. `sample` are tokens on
    which the loss of 8-bit weights is measured, best those of a text.

    Raises
    ------
    UnsupportedModelError
        If `model` is not a causal language model that can be run with a cache.

    Warns
    -----
    PerBranchWarning
        Once, with the reason, if the tree cannot serve the model.
    """
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a causal language model of transformers: load it with AutoModelForCausalLM"
        )
    settings = config if config is not None else EngineConfig()
    reason = _why_not_on_the_tree(model)
    if reason is None:
        runner: TreeRunner | None = None
        try:
            runner = TreeRunner(model, Budget(2**62))  # what is tried here counts against nobody's budget
            reason = _difference(runner, model)
        except ConfigError:
            raise
        except Exception as error:
            reason = f"the tree does not run it ({type(error).__name__}: {error})"
        if reason is None and runner is not None:
            runner.budget = budget
            runner.speed_up(settings, sample)
            return runner
        if runner is not None:
            runner.close()
    warnings.warn(
        f"{type(model).__name__} runs with one KV cache per branch, because {reason}; "
        "answers are the same, memory and time grow with the number of branches",
        PerBranchWarning,
        stacklevel=2,
    )
    try:
        fallback = PrivateRunner(model, budget)
    except ConfigError:
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be run with a cache: {error}") from error
    fallback.speed_up(settings, sample)
    return fallback


def _why_not_on_the_tree(model: PreTrainedModel) -> str | None:
    try:
        kinds = LayerKinds(model.config)
    except Exception as error:
        return f"its cache is of a kind of its own ({error})"
    if kinds.unsupported:
        return f"it has layers of the kinds {', '.join(sorted(kinds.unsupported))}"
    if not kinds.windows:
        return "it has no attention layers"
    if kinds.changing_rope and context_length(model) > kinds.changing_rope:
        return "its rotary embedding depends on the length of the sequence"
    if not model._can_set_attn_implementation():
        return "its attention cannot be exchanged"
    return None


@torch.inference_mode()
def _difference(runner: TreeRunner, model: PreTrainedModel) -> str | None:
    """Compute a few tokens on the tree and without a cache; say what differs."""
    vocabulary = vocabulary_size(model)
    tokens = [(7 * i + 3) % vocabulary for i in range(12)]
    expected = model(input_ids=torch.tensor([tokens], device=runner.device), use_cache=False).logits[0, -1].float()
    tree = runner.tree()
    try:
        with runner.attached():
            node = tree.root
            for piece in (tokens[:5], tokens[5:11], tokens[11:]):
                with closing(runner.tail([node], len(piece), 0)) as tail:
                    tail.grow(len(piece))
                    logits = runner.forward([Run(tail, [piece], [node], wanted=int(piece == tokens[11:]))])
                    (segment,) = tail.part([0], [])
                node = tree.insert(node, tuple(piece), segment)
            got = logits[0].float()
    finally:
        tree.clear()
    if model.dtype in (torch.float32, torch.float64):
        same = bool((got - expected).abs().max() <= 1e-3 * expected.abs().max().clamp(min=1.0))
    else:  # 16-bit logits depend on the shape of the batch; a wrong attention differs far more
        same = bool(torch.cosine_similarity(got, expected, dim=0) > 0.98)
    return None if same else "the tree gives other logits than the model alone"
