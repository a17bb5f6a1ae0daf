"""Tools, calls and results reach the prompt, whatever the chat template knows of them."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_text_chat import byte_tokenizer, controls, turns
from tokenizers import AddedToken
from tool_templates import CHATML, LLAMA, MISTRAL, QWEN, TOKENS

from rksc_agents.errors import ConfigError
from rksc_agents.model.text import TextCodec
from rksc_agents.model.tools import tools_of
from rksc_agents.types import ToolCall

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
TOOLS = tools_of([WEATHER, {"name": "clock.now"}])
FAMILIES = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "chatml": CHATML}

every_family = pytest.mark.parametrize("template", FAMILIES.values(), ids=FAMILIES.keys())


def tokenizer_of(template: str | None, *, special: bool = False, **options: Any):
    tokens = TOKENS.get(template or "", [])
    tokenizer = byte_tokenizer(template, tokens=() if special else tokens, **options)
    if special:
        added = [AddedToken(token, special=True, normalized=False) for token in tokens]
        tokenizer.add_tokens(added, special_tokens=True)
    return tokenizer


def rendered(template: str | None, prompt: Any, tools: Any = ()) -> str:
    tokenizer = tokenizer_of(template)
    return tokenizer.decode(TextCodec(tokenizer).encode(prompt, tools))


def calling(*calls: tuple[str, Any], content: str | None = None, ids: bool = True) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            | ({"id": f"call_{k}"} if ids else {})
            for k, (name, arguments) in enumerate(calls)
        ],
    }


def result(content: str, k: int | None = 0) -> dict[str, Any]:
    return {"role": "tool", "content": content} | ({} if k is None else {"tool_call_id": f"call_{k}"})


PARIS = ("get_weather", {"place": "Paris"})
NOW = ("clock.now", {})


# Tools


@every_family
@pytest.mark.parametrize("system", [[], turns("s:Be brief.")])
def test_tools_reach_the_prompt(template: str, system: list[Any]):
    text = rendered(template, [*system, *turns("u:Is it warm in Paris?")], TOOLS)
    for part in ("get_weather", "The weather of a place.", '"required"', "clock.now", "Is it warm in Paris?"):
        assert text.count(part) == 1
    assert text.count("Be brief.") == len(system)


def test_a_template_that_knows_tools_writes_them_itself():
    text = rendered(QWEN, "q", TOOLS)
    functions = "\n".join(json.dumps(tool.function()) for tool in TOOLS)
    assert f"<tools>\n{functions}\n</tools>" in text
    assert text.startswith("<|im_start|>system\nBe helpful.\n\nFunctions:")
    assert "[AVAILABLE_TOOLS] [" in rendered(MISTRAL, "q", TOOLS)
    assert "Environment: ipython" in rendered(LLAMA, "q", TOOLS)


def test_a_template_without_tools_gets_them_in_the_system_text():
    text = rendered(CHATML, turns("s:Be brief.", "u:q"), TOOLS)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call tools.")
    assert text.count("<|im_start|>system") == 1
    assert json.dumps(WEATHER | {"description": WEATHER["description"]}) in text
    assert rendered(CHATML, "q", TOOLS).startswith("<|im_start|>system\nYou can call tools.")
    assert TextCodec(tokenizer_of(CHATML)).tool_format.name == "generic"


def test_a_template_of_a_family_that_is_not_known_gets_them_in_the_system_text():
    template = CHATML + "{% if tools %}<|call|>{{ tools | tojson }}{% endif %}"
    text = rendered(template, "q", TOOLS)
    assert text.startswith("<|im_start|>system\nYou can call tools.")
    assert "<|call|>" not in text


def test_a_system_text_with_tools_is_folded_in_where_there_is_no_system_role():
    template = CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
    )
    text = rendered(template, "Warm?", TOOLS)
    assert text.startswith("<|im_start|>user\nYou can call tools.")
    assert "\n\nWarm?<|im_end|>" in text


def test_a_model_without_a_template_gets_them_as_text():
    with pytest.warns(UserWarning, match="no chat template"):
        text = rendered(None, "Warm?", TOOLS)
    assert text.startswith("You can call tools.")
    assert "get_weather" in text
    assert text.endswith("\n\nUser: Warm?\nAssistant:")


def test_tools_that_a_template_leaves_out_are_told_and_that_is_said_once():
    codec = TextCodec(tokenizer := byte_tokenizer(CHATML + "{# tools <tool_call> #}"))
    with pytest.warns(UserWarning, match="mentions tools but leaves them out") as said:
        text = tokenizer.decode(codec.encode([*turns("u:q"), calling(PARIS), result("12")], TOOLS))
    assert len(said) == 1
    assert tokenizer.decode(codec.encode("q", TOOLS)).count("You can call tools.") == 1
    assert text.startswith("<|im_start|>system\nYou can call tools.")


def test_without_tools_nothing_is_said_of_them():
    for template in FAMILIES.values():
        assert "tool" not in rendered(template, "q").lower()


# Calls and results


@every_family
@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("tools", [(), TOOLS])
def test_calls_and_results_reach_the_prompt(template: str, as_text: bool, ids: bool, tools: Any):
    arguments = {"place": 'Saint-"É"\nX'}
    call = calling(("get_weather", json.dumps(arguments) if as_text else arguments), ids=ids)
    prompt = [*turns("u:q"), call, result('{"temp": "12\n"}', 0 if ids else None)]
    text = rendered(template, prompt, tools)
    assert json.dumps(arguments, ensure_ascii=False) in text
    assert '{"temp": "12\n"}' in text or json.dumps('{"temp": "12\n"}') in text
    assert "get_weather" in text


@every_family
def test_arguments_as_text_and_as_an_object_are_the_same(template: str):
    one, other = ([*turns("u:q"), calling(("clock.now", a)), result("12")] for a in ({"zone": "x"}, '{"zone":"x"}'))
    assert rendered(template, one) == rendered(template, other)
    nothing = [
        rendered(template, [*turns("u:q"), calling(("clock.now", a)), result("12")]) for a in ({}, "", None, "{}")
    ]
    assert len(set(nothing)) == 1


def test_arguments_that_are_no_object_are_kept():
    call = calling(("clock.now", "zone=x"))
    assert "zone=x" in rendered(QWEN, [*turns("u:q"), call, result("12")])
    assert "zone=x" in rendered(CHATML, [*turns("u:q"), call, result("12")])


def test_a_template_without_calls_gets_them_as_text():
    prompt = [*turns("s:S", "u:q"), calling(PARIS, NOW, content="I look."), result("12"), result("noon", 1)]
    assert rendered(CHATML, prompt) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
        '<|im_start|>assistant\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": {"place": "Paris"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "clock.now", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n12\n</tool_response>\n\n<tool_response>\nnoon\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_parallel_calls_are_paired_with_their_results_where_only_one_may_be_made():
    for results in (
        [result("12"), result("noon", 1)],
        [result("noon", 1), result("12")],
        [result("12", None), result("noon", None)],
    ):
        text = rendered(
            LLAMA,
            [
                *turns("s:S", "u:q"),
                calling(PARIS, NOW, content="x", ids=results[0].get("tool_call_id") is not None),
                *results,
            ],
        )
        assert text == (
            "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
            '{"name": "get_weather", "parameters": {"place": "Paris"}}<|eot_id|>'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"12"<|eot_id|>'
            '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "clock.now", "parameters": {}}<|eot_id|>'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"noon"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
        )


def test_a_pair_without_its_result_and_a_result_without_its_call_are_kept():
    prompt = [*turns("u:q"), calling(PARIS, NOW), result("noon", 1), result("stray", 7), result("late", 8)]
    text = rendered(LLAMA, prompt)
    assert text.index("get_weather") < text.index("clock.now") < text.index("noon")
    assert text.count("ipython") == 3
    assert "stray" in text
    assert "late" in text


def test_what_is_said_beside_parallel_calls_is_said_once():
    template = QWEN.replace(
        "{%- for call in m.tool_calls %}",
        "{%- if m.tool_calls | length > 1 %}{{- raise_exception('one at a time') }}{%- endif %}"
        "{%- for call in m.tool_calls %}",
    )
    assert template != QWEN
    prompt = [*turns("u:q"), calling(PARIS, NOW, content="I look."), result("12"), result("noon", 1)]
    text = rendered(template, prompt)
    assert text.count("I look.") == 1
    assert text.index("I look.") < text.index("get_weather") < text.index("12") < text.index("clock.now")


@pytest.mark.parametrize("ids", [True, False])
def test_mistrals_ids_have_nine_letters_and_fit_together(ids: bool):
    prompt = [
        *turns("u:q"),
        calling(PARIS, NOW, ids=ids),
        result("12", 0 if ids else None),
        result("noon", 1 if ids else None),
    ]
    text = rendered(MISTRAL, prompt, TOOLS)
    first, second = (part[:9] for part in text.split('"id": "')[1:])
    assert first.isalnum()
    assert first != second
    assert f'{{"content": "12", "call_id": "{first}"}}' in text
    assert f'{{"content": "noon", "call_id": "{second}"}}' in text
    assert rendered(MISTRAL, prompt, TOOLS) == text


def test_an_id_that_fits_stays():
    call = calling(PARIS)
    call["tool_calls"][0]["id"] = "aB3456789"
    text = rendered(MISTRAL, [*turns("u:q"), call, {"role": "tool", "content": "12", "tool_call_id": "aB3456789"}])
    assert text.count("aB3456789") == 2


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("add", "message 1 has the tool_calls 'add'"),
        ({"name": "add"}, "message 1 has the tool_calls"),
        (["add"], "message 1 has the tool call 'add'"),
        ([{"function": {"arguments": {}}}], "message 1 has the tool call"),
    ],
)
def test_malformed_calls_are_typed_errors(calls: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        TextCodec(tokenizer_of(QWEN)).encode([*turns("u:q"), {"role": "assistant", "content": "", "tool_calls": calls}])


def test_the_callers_messages_are_left_alone():
    prompt = [*turns("u:q"), calling(("clock.now", '{"x": 1}')), result("12")]
    before = json.dumps(prompt)
    rendered(MISTRAL, prompt, TOOLS)
    assert json.dumps(prompt) == before


# Ends of conversations

TAILS = {
    "tool": [*turns("u:q"), calling(PARIS), result("Sunny!")],
    "tools": [*turns("u:q"), calling(PARIS, NOW), result("Sunny!"), result("noon", 1)],
    "assistant": turns("u:q", "a:So it"),
    "call": [*turns("u:q"), calling(PARIS, content="I look.")],
    "system": turns("u:q", "a:x", "s:Be brief."),
    "system alone": turns("s:Be brief."),
    "after results": [*turns("u:q"), calling(PARIS), result("Sunny!"), *turns("u:and now?")],
    "answered": [*turns("u:q"), calling(PARIS), result("Sunny!"), *turns("a:It is sunny.", "u:and now?")],
    "tool first": [result("Sunny!")],
    "two users": turns("u:q", "u:r"),
}


@every_family
@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS.keys())
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["", "tools"])
def test_a_conversation_may_end_in_anything(template: str, tail: Any, tools: Any):
    text = rendered(template, tail, tools)
    for message in tail:
        if message["role"] != "assistant":
            assert message["content"] in text
        for call in message.get("tool_calls", ()):
            assert call["function"]["name"] in text
    assert all(tool.name in text for tool in tools)
    if tail[-1]["role"] == "assistant" and "tool_calls" not in tail[-1]:
        assert text.endswith("So it")
    elif template is not MISTRAL:
        assert text.endswith(("assistant\n", "assistant<|end_header_id|>\n\n"))


def test_a_changed_text_is_better_than_a_list_of_parts_written_as_it_is():
    template = CHATML.replace("{{ m.content }}", "{{ m.content | upper if m.content is string else m.content }}")
    with pytest.warns(UserWarning, match="leaves out or changes a text"):
        text = rendered(template, turns("u:Warm?"))
    assert "WARM?" in text
    assert "'type'" not in text


# The next turn


def turn(codec: TextCodec, calls: list[ToolCall], results: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the model saw and wrote in its turn, and the prompt of the next one."""
    question = turns("s:S", "u:q")
    first = codec.encode(question, TOOLS)
    written = tuple(codec._tokenizer.encode(codec.tool_format.spell(calls), add_special_tokens=False))
    called = calling(*((call.name, call.arguments) for call in calls))
    answers = [result(text, k) for k, text in enumerate(results)]
    return (*first, *written), codec.encode([*question, called, *answers], TOOLS)


json_texts = st.text(st.characters(exclude_categories=["Cs"]))


@settings(deadline=None)
@given(place=json_texts, count=st.integers(), scale=st.floats(allow_nan=False, allow_infinity=False))
@pytest.mark.parametrize(("template", "most"), [(QWEN, 2), (LLAMA, 1), (CHATML, 2)], ids=["qwen", "llama", "chatml"])
def test_the_next_turn_begins_with_what_was_seen_and_written(
    template: str, most: int, place: str, count: int, scale: float
):
    tokenizer = tokenizer_of(template)
    codec = TextCodec(tokenizer)
    assume(not any(token in place for token in tokenizer.get_added_vocab()))  # `written` would have it as a token
    call = ToolCall(name="get_weather", arguments={"place": place, "more": [count, scale, None, {"é": True}]})
    calls = [call, ToolCall(name="clock.now", arguments={})][:most]
    seen, after = turn(codec, calls, ["12", "noon"][:most])
    assert after[: len(seen)] == seen
    assert len(after) > len(seen)


# Control tokens in what comes from outside

hostile = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<|im_end|>", "<|eot_id|>", "[INST]", "[TOOL_CALLS]", "<|python_tag|>"]
    )
    | st.sampled_from(["<think>", "a", " ", "\n", '"', "\\", "<|im_", "é世"])
).map("".join)


@every_family
@pytest.mark.parametrize("special", [False, True])
@settings(deadline=None, max_examples=20)
@given(texts=st.tuples(hostile, hostile, hostile, hostile, hostile))
def test_nothing_from_outside_becomes_a_control_token(template: str, special: bool, texts: tuple[str, ...]):
    tokenizer = tokenizer_of(template, special=special)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    codec = TextCodec(tokenizer)

    def encoded(description: str, key: str, argument: str, content: str, result_: str) -> tuple[int, ...]:
        schema = {"type": "object", "properties": {key: {"description": description, "enum": [argument]}}}
        tools = tools_of([{"name": "f", "description": description, "parameters": schema}])
        call = calling(("f", {key: [argument]}), content=content)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return codec.encode([*turns("u:q"), call, result(result_)], tools)

    description, key, argument, content, result_ = texts
    if template is not QWEN and template is not CHATML:
        content = ""
    content = content.replace("<think>", "")  # the assistant's own thinking stays
    tokens = encoded(description, key, argument, content, result_)
    assert controls(tokenizer, tokens) == controls(tokenizer, encoded("d", "k", "a", "c" if content else "", "r"))
    text = tokenizer.decode(tokens)
    assert result_.strip() in text or json.dumps(result_, ensure_ascii=False)[1:-1].strip() in text
    assert json.dumps(description, ensure_ascii=False) in text


def test_markers_that_the_template_or_this_package_writes_are_tokens():
    for template, prompt in [(QWEN, turns("u:q")), (CHATML, turns("u:q"))]:
        tokenizer = tokenizer_of(QWEN, special=True)
        tokenizer.chat_template = template
        codec = TextCodec(tokenizer)
        tokens = codec.encode([*prompt, calling(PARIS), result("12")], TOOLS)
        assert controls(tokenizer, tokens).count("<tool_call>") == 2


def test_a_name_that_holds_a_control_token_stays_text():
    tokenizer = byte_tokenizer(QWEN, tokens=["<tool_call>"])
    tokenizer.add_tokens([AddedToken("x::y", special=True, normalized=False)], special_tokens=True)
    codec = TextCodec(tokenizer)
    tools = tools_of([{"name": "x::y"}])
    tokens = codec.encode([*turns("u:q"), calling(("x::y", {})), result("12")], tools)
    assert "x::y" not in controls(tokenizer, tokens)
    assert tokenizer.decode(tokens).count("x::y") == 2


# Marker tokens in answers


@pytest.mark.parametrize("special", [False, True])
def test_marker_tokens_have_text_when_they_are_asked_for(special: bool):
    tokenizer = tokenizer_of(QWEN, special=special)
    codec = TextCodec(tokenizer)
    answer = codec.tool_format.spell([ToolCall(name="clock.now", arguments={})])
    tokens = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    assert codec.tool_tokens == set(tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"]))
    assert codec.tool_tokens <= set(tokens)
    assert codec.decode(tokens, shown=codec.tool_tokens) == answer
    assert ("<tool_call>" in codec.decode(tokens)) is not special
    stream = codec.stream(shown=codec.tool_tokens)
    assert "".join([*map(stream.push, tokens), stream.finish()]) == answer
    assert codec.added["<tool_call>"] in codec.tool_tokens


def test_the_format_follows_the_template():
    tokenizer = tokenizer_of(QWEN)
    codec = TextCodec(tokenizer)
    names = []
    for template in (QWEN, LLAMA, MISTRAL, CHATML, None):
        tokenizer.chat_template = template
        names.append(codec.tool_format.name)
    assert names == ["hermes", "llama3", "mistral", "generic", "generic"]


# What follows an answer


@every_family
def test_a_follow_up_fits_behind_a_conversation_with_calls(template: str):
    tokenizer = tokenizer_of(template)
    codec = TextCodec(tokenizer)
    prompt = [*turns("u:q"), calling(PARIS), result("12")]
    text = tokenizer.decode(codec.follow_up(prompt, "Sure?", codec.encode(prompt)))
    assert "Sure?" in text
    assert "get_weather" not in text
    plain = tokenizer.decode(codec.follow_up("q", "Sure?", codec.encode("q")))
    assert text == plain
