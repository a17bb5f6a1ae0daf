"""What an answer is to look like: free text, text that follows a grammar, or calls of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rksc_agents.errors import ConfigError
from rksc_agents.model.constraint import Constraint
from rksc_agents.model.grammar import Grammar, JSONSchema, after_thinking
from rksc_agents.model.text import TextCodec
from rksc_agents.model.thinking import CLOSE_TOKENS
from rksc_agents.model.tools import Tool, choice_of, tools_of
from rksc_agents.model.tools.spec import ANY, AUTO, NONE
from rksc_agents.reasoning.answers import AnswerExtractor
from rksc_agents.reasoning.hints import hinted
from rksc_agents.reasoning.reading import JSONReader, Reader, TextReader, ToolReader
from rksc_agents.types import Prompt, Rendered


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer is to look like.

    Attributes
    ----------
    tools : tuple of Tool
        What the model is offered, also where it may call nothing: the next turn's prompt begins with this one's.
    choice : str
        "auto", "any", "none" or the name of the tool that is to be called.
    parallel : bool
        Whether several calls may be made at once.
    grammar : Grammar or None
        What text that is no call follows.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = AUTO
    parallel: bool = True
    grammar: Grammar | None = None

    @classmethod
    def of(
        cls,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str = AUTO,
        parallel_tool_calls: bool | None = None,
        grammar: Grammar | None = None,
    ) -> Form:
        """Check what a call asks for.

        Where a call is demanded, one is made unless `parallel_tool_calls` is True: a small model that must call says
        the same call again and again until its tokens are used up.

        Raises
        ------
        ConfigError
            If a tool is malformed, the choice is none of them, or a call is forced and a grammar given.
        """
        offered = tools_of(tools)
        choice = choice_of(tool_choice, offered)
        if grammar is not None and not isinstance(grammar, Grammar):
            raise ConfigError(f"grammar = {grammar!r}: give a JSONSchema, Regex, Choice or Lark")
        if grammar is not None and choice not in (AUTO, NONE):
            raise ConfigError(
                f"tool_choice = {tool_choice!r} with a grammar: a forced call leaves no text that could follow a "
                "grammar; drop one of the two"
            )
        parallel = choice in (AUTO, NONE) if parallel_tool_calls is None else bool(parallel_tool_calls)
        return cls(offered, choice, parallel, grammar)

    def told(self, prompt: Prompt) -> Prompt:
        """The prompt, with what its answer is to look like behind the question; a rendered one as it is."""
        instruction = self.grammar.instruction if self.grammar is not None else None
        if instruction is None or isinstance(prompt, Rendered):
            return prompt
        if not isinstance(prompt, str) and not any(message.get("role") == "user" for message in prompt):
            return [*prompt, {"role": "user", "content": instruction}]
        return hinted(prompt, instruction, "after")

    def reader(self, codec: TextCodec, extractor: AnswerExtractor) -> Reader:
        """What reads such answers."""
        reader: Reader = TextReader(extractor)
        if isinstance(self.grammar, JSONSchema):
            reader = JSONReader(self.grammar.schema)
        if self.tools and self.choice != NONE:
            reader = ToolReader(codec.tool_format, self.tools, reader, codec.tool_tokens)
        return reader

    def constraint(self, codec: TextCodec, thinking_opened: bool) -> Constraint | None:
        """The grammar that branches follow from the prompt's end on; None for free text.

        Raises
        ------
        ConfigError
            If the schema of an answer or a tool has what cannot be enforced.
        """
        parts = []
        if self.grammar is not None:
            parts.append(self.grammar.lark())
        if self.tools and not (self.grammar is not None and self.choice == NONE):
            choice = ANY if self.grammar is not None else self.choice
            form = codec.tool_format
            parts.append(form.lark(self.tools, choice, self.parallel, codec.added, codec.eos_token_ids))
        if not parts:
            return None
        if thinking_opened:  # what is only thought about is no call
            closings = [codec.added.get(closing, closing) for closing in sorted(CLOSE_TOKENS)]
            parts = [after_thinking(part, closings) for part in parts]
        return codec.grammars.compile(parts[0] if len(parts) == 1 else either(*parts))


def either(first: str, second: str) -> str:
    """A grammar of what one of two grammars describes."""
    return f"start: first | second\nfirst: %lark {{\n{first}\n}}\nsecond: %lark {{\n{second}\n}}"
