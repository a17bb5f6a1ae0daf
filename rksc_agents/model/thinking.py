"""Thinking and answer: what a reasoning model writes between its markers is not its answer."""

from __future__ import annotations

import re

PAIRS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),  # Qwen3, DeepSeek-R1, SmolLM3, Phi-4-reasoning and most others
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("<|channel>thought", "<channel|>"),  # Gemma 4
)
"""Opening and closing markers."""

OPEN_TOKENS = frozenset([opening for opening, _ in PAIRS[:-1]] + ["<|channel>"])
CLOSE_TOKENS = frozenset(closing for _, closing in PAIRS)
"""Markers that can be one token of a vocabulary."""

HARMONY_TOKENS = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|end|>"})
"""Tokens of gpt-oss that separate channels; special tokens only where all of them are defined."""

MARKERS = (*OPEN_TOKENS, *CLOSE_TOKENS, PAIRS[-1][0], *HARMONY_TOKENS)
"""All texts that mark where thinking begins or ends."""

_HARMONY_OPENING = "<|channel|>analysis<|message|>"
_CLOSING_OF = dict(PAIRS)
_OPENING = re.compile("|".join(re.escape(opening) for opening, _ in PAIRS))
_CLOSING = re.compile("|".join(re.escape(closing) for _, closing in PAIRS))
_VISIBLE = re.compile(r"\S|\Z")
_SEGMENT = re.compile(
    r"(?:<\|start\|>(?P<role>[^<]*))?<\|channel\|>(?P<channel>.*?)<\|message\|>(?P<body>.*?)"
    r"(?=<\|(?:end|start|channel|call|return)\|>|\Z)",
    re.DOTALL,
)


def split_thinking(text: str, *, opened: bool = False) -> tuple[str, str]:
    """Separate what a model thought from what it answered.

    Parameters
    ----------
    text : str
        What the model wrote, its markers included.
    opened : bool, default False
        The prompt ended inside a thinking block, so the text starts in one.

    Returns
    -------
    thinking : str
        The text of all blocks without surrounding white space, joined by a blank line. A block that
        is never closed reaches to the end.
    answer : str
        The rest. Without any marker it is `text`, unchanged.

    Notes
    -----
    An opening marker in the middle of a line counts only if its block is closed: an answer may
    mention a marker. A closing marker that closes nothing is text.
    """
    if "<|channel|>" in text and "<|message|>" in text:
        return _split_channels(text, opened)
    thoughts: list[str] = []
    answer: list[str] = []
    position = 0
    if opened:
        closing = _CLOSING.search(text)
        body, position = (text[: closing.start()], closing.end()) if closing else (text, len(text))
        repeated = _OPENING.match(body.lstrip())  # some models write the marker again
        thoughts.append(body.lstrip()[repeated.end() :] if repeated else body)
    rest, more = _split_blocks(text[position:])
    thoughts += more
    answer.append(rest.lstrip() if thoughts else rest)
    return "\n\n".join(filter(None, (thought.strip() for thought in thoughts))), "".join(answer)


def settled(text: str, *, opened: bool = False) -> int:
    """How much of a growing `text` is thinking or answer for certain, whatever follows.

    The rest begins with an opening marker in the middle of a line, whose block may never be closed, or with a header of
    gpt-oss that is not complete.
    """
    first = min((at for at in map(text.find, HARMONY_TOKENS) if at >= 0), default=-1)
    if first >= 0:
        if "<|channel|>" not in text or "<|message|>" not in text:
            return first
        header = max(text.rfind("<|start|>"), text.rfind("<|channel|>"), text.rfind("<|end|>"))
        begun = max(text.rfind("<|start|>", 0, header), text.rfind("<|end|>", 0, header))
        if begun >= 0 and "<|message|>" not in text[begun:header]:
            header = begun
        if "<|message|>" in text[header:]:
            return len(text)
        return header if "<|channel|>" in text[:header] and "<|message|>" in text[:header] else first
    position = 0
    if opened:
        closing = _CLOSING.search(text)
        position = closing.end() if closing else len(text)
    while opening := _OPENING.search(text, position):
        end = text.find(_CLOSING_OF[opening.group()], opening.end())
        if end < 0:
            midline = text[text.rfind("\n", 0, opening.start()) + 1 : opening.start()].strip()
            return opening.start() if midline else len(text)
        position = end + len(_CLOSING_OF[opening.group()])
    return len(text)


def ends_inside(text: str, openings: frozenset[str]) -> bool:
    """Say whether `text` ends with one of `openings` or with the start of gpt-oss's analysis."""
    return text.rstrip().endswith((*openings, _HARMONY_OPENING))


def closing_marker(text: str) -> str:
    """What closes the thinking block that `text` ends in; empty where it ends in none."""
    end = text.rstrip()
    opening = max((opening for opening in _CLOSING_OF if end.endswith(opening)), key=len, default=None)
    if opening is not None:
        gap = text[len(end) :].count("\n")  # an empty block is two line ends, as models were trained on it
        return "\n" * max(0, 2 - gap) + f"{_CLOSING_OF[opening]}\n\n"
    return "<|end|><|start|>assistant<|channel|>final<|message|>" if end.endswith(_HARMONY_OPENING) else ""


def _split_blocks(text: str) -> tuple[str, list[str]]:
    """Return `text` without its thinking blocks, and the blocks."""
    outside: list[str] = []
    blocks: list[str] = []
    unclosed: set[str] = set()  # a marker that is not found once is not looked for again: linear cost
    start = scan = 0
    while opening := _OPENING.search(text, scan):
        closing = _CLOSING_OF[opening.group()]
        end = -1 if closing in unclosed else text.find(closing, opening.end())
        scan = opening.end()
        if end < 0:
            unclosed.add(closing)
            if text[text.rfind("\n", 0, opening.start()) + 1 : opening.start()].strip():
                continue
        outside.append(text[start : opening.start()])
        blocks.append(text[opening.end() : end] if end >= 0 else text[opening.end() :])
        start = scan = end + len(closing) if end >= 0 else len(text)
        last = next((part[-1] for part in reversed(outside) if part), " ")
        if last.isspace() and (following := _VISIBLE.search(text, start)):
            start = scan = following.start()  # the white space after a block belongs to the block
    outside.append(text[start:])
    return "".join(outside), blocks


def _split_channels(text: str, opened: bool) -> tuple[str, str]:
    """Separate gpt-oss's channels: analysis and what is addressed to a tool is not for the user."""
    thoughts: list[str] = []
    answer: list[str] = []
    if opened:
        body, _, text = text.partition("<|end|>")
        thoughts.append(body)
    first = _SEGMENT.search(text)
    if not opened:
        answer.append(text[: first.start()] if first else text)
    for segment in _SEGMENT.finditer(text):
        header = f"{segment['role'] or ''} {segment['channel']}"
        hidden = segment["channel"].strip().startswith("analysis") or " to=" in header
        (thoughts if hidden else answer).append(segment["body"])
    return "\n\n".join(filter(None, (thought.strip() for thought in thoughts))), "".join(answer)
