"""How to reason, as options: the strategies' names and settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rksc_agents.cli import common, options

if TYPE_CHECKING:
    from rksc_agents.reasoning import Strategy

# The names and rules as in reasoning/, which cannot be imported without torch.
STRATEGY_NAMES = ("direct", "self-consistency", "best-of-n", "tree-of-thought", "beam-search")
Vote = Literal["auto", "majority", "confidence", "verifier", "mbr", "universal"]
ScoreName = Literal["confidence", "verifier"]
SearchName = Literal["bfs", "dfs", "best-first"]

Name = Annotated[str, typer.Option(metavar=f"[{'|'.join(STRATEGY_NAMES)}]", help="How to reason.")]
Branches = Annotated[int | None, typer.Option(help="Branches of reasoning; the strategy's default if left out.")]
VoteRule = Annotated[Vote | None, typer.Option(help="self-consistency: the rule that decides.")]
Score = Annotated[ScoreName | None, typer.Option(help="best-of-n: what is compared.")]
Hint = Annotated[
    list[str] | None,
    typer.Option(help="self-consistency: a line after the question, for branches in turn; may be repeated."),
]
Proposals = Annotated[int | None, typer.Option(help="tree-of-thought: steps proposed from each thought.")]
Breadth = Annotated[
    int | None, typer.Option(help="tree-of-thought: thoughts kept in each level, or leaves that end the search.")
]
Search = Annotated[SearchName | None, typer.Option(help="tree-of-thought: in which order.")]
Beams = Annotated[int | None, typer.Option(help="beam-search: lines that are kept.")]
Expansions = Annotated[int | None, typer.Option(help="beam-search: steps proposed from each line.")]
Depth = Annotated[int | None, typer.Option(help="tree-of-thought, beam-search: steps of a line at most.")]
Delimiter = Annotated[
    str | None, typer.Option(help="tree-of-thought, beam-search: what ends a step; a line break by default.")
]
VerifierName = Annotated[
    str | None,
    typer.Option(
        metavar=f"[{'|'.join(common.PROBING)}|PACKAGE.MODULE:FUNCTION]",
        help="Who says how right a branch is; self by default.",
    ),
]

_OPTIONS = {"hints": "--hint"}  # where the option is not called as the field
_VERIFYING = {"self-consistency": "vote", "best-of-n": "score"}  # the field that must say "verifier"


def plan(name: str, **given: Any) -> Strategy:
    """Make a strategy of what was typed.

    Parameters
    ----------
    name : str
        The strategy's.
    **given
        Values of its fields by name as they were typed, None where the option was left out.
    """
    from rksc_agents.reasoning import STRATEGIES

    kind = STRATEGIES[common.one_of("--strategy", name, STRATEGIES)]
    settings = {field: value for field, value in given.items() if value not in (None, [])}
    taken = [field for field in given if field in kind.model_fields and not _idle(field, name)]
    if lacking := [field for field in settings if field not in taken]:
        takes = ", ".join(map(_option, taken)) or "no settings"
        raise typer.BadParameter(
            f"{', '.join(map(_option, lacking))} is not for --strategy {name}, which takes {takes}"
        )
    if "verifier" in settings:
        switch = _VERIFYING.get(name)
        if switch is not None and settings.get(switch) != "verifier":
            raise typer.BadParameter(f"--verifier has no use in {name} without --{switch} verifier: add that")
        settings["verifier"] = common.verifier_of(settings["verifier"])
    if "hints" in settings:
        settings["hints"] = options.texts(settings["hints"], "--hint")
    if "delimiter" in settings:
        common.utf8(settings["delimiter"], "--delimiter")
    return kind(**settings)


def _idle(field: str, name: str) -> bool:
    """Whether a strategy has a field without ever using it."""
    return field == "verifier" and name == "direct"


def _option(field: str) -> str:
    return _OPTIONS.get(field, f"--{field}")
