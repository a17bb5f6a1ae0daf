"""Universal self-consistency: the model reads the candidates and names the most consistent (arXiv 2311.17311)."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from rksc_agents.engine.session import Session
from rksc_agents.errors import PromptTooLongError
from rksc_agents.types import Prompt
from rksc_agents.verify.words import choice_tokens

REQUEST = (
    "Here are {count} answers to the question above.\n\n{candidates}\n\n"
    "Which of them agrees best with all of them? Reply with its letter alone."
)


async def name_best(session: Session, question: Prompt, texts: Sequence[str]) -> int | None:
    """Return the index of the text that the model names, of equals the first; None if they do not fit its context.

    The request follows the question in the conversation, so the question's KV is shared. At most 26 texts are shown;
    equal ones once.
    """
    shown = list(dict.fromkeys(texts))[: len(ascii_uppercase)]
    letters = ascii_uppercase[: len(shown)]
    listed = "\n\n".join(f"{letter}. {text.strip()}" for letter, text in zip(letters, shown, strict=True))
    request = REQUEST.format(count=len(shown), candidates=listed)
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
    prompt = session.codec.encode([*messages, {"role": "user", "content": request}])
    base = session.cached(prompt, len(prompt) - 1)
    choices = choice_tokens(session.codec, [[letter] for letter in letters])
    try:
        (reading,) = await session.probe([base], [prompt[len(base.tokens) :]], choices)
    except PromptTooLongError:
        return None
    finally:
        session.release(base)
    named = max(range(len(shown)), key=lambda i: (reading.values[i], -i))
    return list(texts).index(shown[named])
