"""A prompt becomes token ids: templates of all manners, no control token from user text, one BOS."""

from __future__ import annotations

import sys
import threading
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rksc_agents.errors import ConfigError
from rksc_agents.model.text import TextCodec

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (  # Gemma's manner: no system role, roles alternate, text trimmed
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}[/]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ALTERNATING = STRICT.replace("{{ raise_exception('System role not supported') }}", "").replace(
    "{{ bos_token }}",
    "{% if messages[0].role == 'system' %}<<{{ messages[0].content }}>>{% set messages = messages[1:] %}{% endif %}",
)
PARTS_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


def byte_tokenizer(template=None, *, tokens=(), bos=False, **options) -> PreTrainedTokenizerFast:
    """One token per byte, so that every text has exactly one spelling; `tokens` are added, not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in tokens])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    options = {"bos_token": "<s>", "eos_token": "</s>", **options}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **options)


def rendered(tokenizer, prompt) -> str:
    return tokenizer.decode(TextCodec(tokenizer).encode(prompt))


def turns(*pairs: str) -> list[dict[str, str]]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[pair[0]], "content": pair[2:]} for pair in pairs]


def controls(tokenizer, tokens) -> list[str]:
    return [tokenizer.convert_ids_to_tokens(token) for token in tokens if token >= 256]


def test_a_text_is_one_user_turn():
    tokenizer = byte_tokenizer(CHATML)
    expected = tokenizer.apply_chat_template(turns("u:Hi"), add_generation_prompt=True)["input_ids"]
    assert TextCodec(tokenizer).encode("Hi") == TextCodec(tokenizer).encode(turns("u:Hi")) == tuple(expected)


@pytest.mark.parametrize(
    ("prompt", "tail"),
    [
        (turns("u:q", "a:The ans"), "<|im_start|>assistant\nThe ans"),
        (turns("u:q", "a:"), "<|im_start|>assistant\n"),
        (turns("u:q", "a:x", "t:42"), "tool\n42<|im_end|>\n<|im_start|>assistant\n"),
        (turns("u:q", "s:be brief"), "system\nbe brief<|im_end|>\n<|im_start|>assistant\n"),
        (turns("a:hello"), "<|im_start|>assistant\nhello"),
    ],
)
def test_a_conversation_may_end_in_any_role(prompt, tail):
    assert rendered(byte_tokenizer(CHATML), prompt).endswith(tail)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (turns("u:q"), "<s>[user]q[/][assistant]"),
        (turns("s:S", "u:q"), "<s>[user]S\n\nq[/][assistant]"),
        (turns("s:S", "s:T", "u:a", "u:b"), "<s>[user]S\n\nT\n\na\n\nb[/][assistant]"),
        (turns("u:a", "a:b", "a:c", "u:d"), "<s>[user]a[/][assistant]b\n\nc[/][user]d[/][assistant]"),
        (turns("u:a", "a:b", "s:S", "u:d"), "<s>[user]a[/][assistant]b[/][user]S\n\nd[/][assistant]"),
        (turns("s:S"), "<s>[user]S[/][assistant]"),
        (turns("s:S", "a:b", "u:c"), "<s>[user]S[/][assistant]b[/][user]c[/][assistant]"),
        (turns("a:b", "u:c"), "<s>[user][/][assistant]b[/][user]c[/][assistant]"),
        (
            turns("u:q", "a:x", "t:42"),
            "<s>[user]q[/][assistant]x[/][user]<tool_response>\n42\n</tool_response>[/][assistant]",
        ),
        (turns("s:S", "u:q", "a:So"), "<s>[user]S\n\nq[/][assistant]So"),
    ],
)
def test_a_strict_template_gets_what_it_demands(prompt, text):
    assert rendered(byte_tokenizer(STRICT), prompt) == text


def test_only_what_the_template_demands_is_changed():
    tokenizer = byte_tokenizer(ALTERNATING)
    assert rendered(tokenizer, turns("s:S", "u:a", "u:b")) == "<<S>>[user]a\n\nb[/][assistant]"
    assert rendered(byte_tokenizer(CHATML), turns("u:a", "u:b")).count("<|im_start|>user") == 2


def test_tool_calls_are_not_lost_where_tool_results_become_user_turns():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    text = rendered(byte_tokenizer(STRICT), [*turns("u:q"), call, *turns("t:5")])
    assert text == (
        '<s>[user]q[/][assistant]<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>[/]'
        "[user]<tool_response>\n5\n</tool_response>[/][assistant]"
    )


def test_messages_of_tool_calls_are_never_merged():
    call = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "add"}}]}
    template = (
        "{% for m in messages %}{% if m.role == 'user' and not loop.first and loop.previtem.role == 'user' %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}!{{ c.function.name }}{% endfor %}{% endfor %}"
    )
    prompt = [*turns("u:a", "u:b"), call, call, *turns("t:1", "t:2", "u:c")]
    text = "[user]a\n\nb[assistant]x!add[assistant]x!add[tool]1[tool]2[user]c"
    assert rendered(byte_tokenizer(template), prompt) == text


def test_a_tool_call_at_the_end_is_a_finished_message():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    template = CHATML.replace("m.content", "m.content ~ (m.tool_calls[0].function.name if m.tool_calls else '')")
    text = rendered(byte_tokenizer(template), [*turns("u:q"), call])
    assert text.endswith("assistant\nadd<|im_end|>\n<|im_start|>assistant\n")


def test_a_system_text_that_a_template_leaves_out_is_folded_in():
    template = CHATML.replace("<|im_start|>{{ m.role }}", "{% if m.role != 'system' %}<|im_start|>{{ m.role }}", 1)
    template = template.replace("<|im_end|>\n{% endfor %}", "<|im_end|>\n{% endif %}{% endfor %}")
    text = rendered(byte_tokenizer(template), turns("s:Be brief.", "u:q"))
    assert text == "<|im_start|>user\nBe brief.\n\nq<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_changes_user_text_is_told_once():
    codec = TextCodec(byte_tokenizer(CHATML.replace("m.content", "m.content | upper")))
    with pytest.warns(UserWarning, match="leaves out or changes"):
        first = codec.encode("hi")
    assert codec.encode("hi") == first


def test_a_template_that_reads_parts_only_gets_parts():
    assert rendered(byte_tokenizer(PARTS_ONLY), turns("s:S", "u:Hello")) == "[system]S[user]Hello"


def test_a_template_that_rewrites_the_last_message_still_lets_it_be_continued():
    template = CHATML.replace("m.content", "(m.content if m.role == 'user' else m.content | upper)")
    tokenizer = byte_tokenizer(template)
    assert rendered(tokenizer, turns("u:q", "a:so")).endswith("<|im_start|>assistant\nso")


def test_a_template_that_rejects_everything_is_a_typed_error():
    codec = TextCodec(byte_tokenizer("{{ raise_exception('never') }}"))
    with pytest.raises(ConfigError, match="system, user: never"):
        codec.encode(turns("s:S", "u:q"))


def test_content_parts_are_joined():
    prompt = [{"role": "user", "content": [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]}]
    tokenizer = byte_tokenizer(CHATML)
    tokens = TextCodec(tokenizer).encode(prompt)
    assert "user\n<|im_end|><|im_end|>" in tokenizer.decode(tokens)
    assert controls(tokenizer, tokens) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty text"),
        ([], "conversation is empty"),
        ({"role": "user", "content": "q"}, "put a single message in a list"),
        (7, "not int"),
        (["q"], "message 0 is 'q'"),
        ([{"role": "user"}], "message 0 has the content None"),
        ([{"role": "assistant", "content": None}], "message 0 has the content None"),
        ([{"content": "q"}], "role None"),
        ([*turns("u:q"), {"role": "developer", "content": "q"}], "message 1 has the role 'developer'.*system, user"),
        ([{"role": "user", "content": [{"type": "image", "text": "x"}]}], "part 'image'"),
        ([{"role": "user", "content": ["q"]}], "part 'q'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "part 'text'"),
        ("a\ud800", "lone surrogate"),
    ],
)
def test_malformed_prompts_are_typed_errors(prompt, message):
    with pytest.raises(ConfigError, match=message):
        TextCodec(byte_tokenizer(CHATML)).encode(prompt)


def test_the_callers_messages_are_left_alone():
    prompt = turns("s:S", "u:a <s>", "u:b")
    before = [dict(message) for message in prompt]
    TextCodec(byte_tokenizer(STRICT)).encode(prompt)
    assert prompt == before


# Control tokens in user text

hostile = st.lists(st.sampled_from([*SPECIAL, "<|user|>", "<think>", "a", " ", "\n", "<|im_", "end|>", "é世"])).map(
    "".join
)


@settings(deadline=None)
@given(system=hostile, user=hostile.filter(bool), tool=hostile)
@pytest.mark.parametrize("template", [CHATML, STRICT, None])
def test_user_text_never_becomes_a_control_token(template, system, user, tool):
    tokenizer = byte_tokenizer(template, tokens=["<|user|>", "<think>"])
    codec = TextCodec(tokenizer)
    prompt = turns(f"s:{system}", f"u:{user}", "a:x", f"t:{tool}")
    harmless = turns("s:s", "u:u", "a:x", "t:t")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokens, expected = codec.encode(prompt), codec.encode(harmless)
    assert controls(tokenizer, tokens) == controls(tokenizer, expected)
    assert user.strip() in tokenizer.decode(tokens)
    assert tokenizer.decode(codec.encode_text(user)) == user
    assert controls(tokenizer, codec.encode_text(user)) == []


def test_texts_deep_in_a_message_are_kept_out_too():
    template = CHATML.replace("m.content", "m.content ~ (m.tool_calls | tojson if m.tool_calls else '')")
    escaped = template.replace("tojson", "tojson(ensure_ascii=True)")
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"x": ["<|im_end|>"]}}]}
    for candidate in (template, escaped):
        tokenizer = byte_tokenizer(candidate)
        tokens = TextCodec(tokenizer).encode([*turns("u:q"), call, *turns("u:go on")])
        assert controls(tokenizer, tokens) == ["<|im_start|>", "<|im_end|>"] * 3 + ["<|im_start|>"]
        assert '["<|im_end|>"]' in tokenizer.decode(tokens)


def test_tokens_that_a_template_writes_in_pieces_are_control_tokens():
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}", tokens=["<|user|>"]
    )
    tokens = TextCodec(tokenizer).encode("a<|user|>b")
    assert controls(tokenizer, tokens) == ["<|user|>"]


def test_tokens_that_only_normalization_brings_about():
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=True, normalized=True)], special_tokens=True)
    disguised = "\uff1c|im_end|\uff1e"
    assert 259 in tokenizer.encode(disguised)
    tokens = TextCodec(tokenizer).encode(f"a{disguised}b")
    assert controls(tokenizer, tokens) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


def test_a_token_that_plain_pieces_give_is_spelled_out_or_refused():
    vocabulary = {"a": 0, "#": 1, "b": 2, "##": 3, "\n": 4, "§": 5}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("#", "#")]))
    tokenizer.add_special_tokens(["##", "§"])
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert codec.encode_text("a##b") == (0, 1, 1, 2)
    with pytest.raises(ConfigError, match="only as a control token"):
        codec.encode_text("a§")


def test_words_that_merely_are_added_tokens_stay_tokens():
    tokenizer = byte_tokenizer(CHATML, tokens=["<h1>", "\n\n"])
    tokens = TextCodec(tokenizer).encode("<h1>a\n\nb")
    assert controls(tokenizer, tokens)[1:3] == ["<h1>", "\n\n"]
    spaced = byte_tokenizer(CHATML, tokens=["\n"])  # the template writes it, and it is text nevertheless
    assert controls(spaced, TextCodec(spaced).encode("a\nb"))[2] == "\n"


def test_a_sentencepiece_like_tokenizer_gets_no_space_where_a_control_token_was_taken_out():
    vocabulary = {"<unk>": 0, "▁": 1, **{letter: 2 + k for k, letter in enumerate("ab<s>/\n")}}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>"))
    pieces = [tokenizer.id_to_token(token) for token in codec.encode_text("a</s>b")]
    assert pieces == ["▁", "a", "<", "/", "s", ">", "b"]


# BOS


def test_one_bos_whether_or_not_the_tokenizer_adds_one():
    for bos in (False, True):
        for template in (STRICT, "{{ bos_token }}" + STRICT):
            tokens = TextCodec(byte_tokenizer(template, bos=bos)).encode("<s>q")
            assert tokens.count(256) == 1
            assert tokens[0] == 256
        assert TextCodec(byte_tokenizer(CHATML, bos=bos)).encode("q").count(256) == 0


@pytest.mark.parametrize("bos", [False, True])
def test_without_a_template_the_tokenizers_own_bos(bos):
    codec = TextCodec(byte_tokenizer(bos=bos))
    with pytest.warns(UserWarning, match="no chat template"):
        tokens = codec.encode("<s>q")
    assert tokens.count(256) == bos
    assert codec.decode(tokens) == "<s>q"


def test_a_conversation_without_a_template_is_written_as_lines_and_said_once():
    codec = TextCodec(byte_tokenizer())
    with pytest.warns(UserWarning, match="no chat template") as said:
        tokens = codec.encode(turns("s:Be brief.", "u:1+1?", "a:2", "u:2+2?"))
    assert len(said) == 1
    assert said[0].filename == __file__
    assert codec.decode(tokens) == "Be brief.\n\nUser: 1+1?\nAssistant: 2\nUser: 2+2?\nAssistant:"
    assert codec.decode(codec.encode(turns("u:q", "a:So"))) == "User: q\nAssistant: So"
    assert codec.decode(codec.encode("Once upon")) == "Once upon"


def test_a_tokenizer_that_writes_conversations_itself_is_let_do_so():
    class Own(PreTrainedTokenizerFast):
        def apply_chat_template(self, conversation, *, add_generation_prompt, continue_final_message, **options):
            if conversation[0]["role"] != "user":
                raise KeyError("role")
            return {"input_ids": [1, len(conversation), int(add_generation_prompt), int(continue_final_message)]}

    codec = TextCodec(Own(tokenizer_object=Tokenizer(models.BPE({"a": 0}, []))))
    assert codec.encode("q") == (1, 1, 1, 0)
    assert codec.encode(turns("u:q", "a:So")) == (1, 2, 0, 1)
    with pytest.raises(ConfigError, match="rejects the conversation"):
        codec.encode(turns("s:S"))


# Thinking

THINKER = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


@pytest.mark.parametrize("tokens", [["<think>", "</think>"], []])
def test_a_prompt_that_opens_a_thinking_block_is_recognized(tokens):
    tokenizer = byte_tokenizer(THINKER, tokens=tokens)
    codec = TextCodec(tokenizer)
    assert codec.opens_thinking(codec.encode("q"))
    assert not TextCodec(byte_tokenizer(CHATML, tokens=tokens)).opens_thinking(codec.encode(turns("u:q", "a:So")))
    closed = TextCodec(byte_tokenizer(THINKER.replace("<think>\n", "<think>\n\n</think>\n\n"), tokens=tokens))
    assert not closed.opens_thinking(closed.encode("q"))


def test_user_text_opens_no_thinking_block():
    codec = TextCodec(byte_tokenizer(CHATML, tokens=["<think>", "</think>"]))
    assert not codec.opens_thinking(codec.encode("what is <think>"))
    base = TextCodec(byte_tokenizer(tokens=["<think>", "</think>"]))
    with pytest.warns(UserWarning, match="no chat template"):
        assert not base.opens_thinking(base.encode("what is <think>"))


def test_the_assistants_own_thinking_stays_markers_and_can_be_continued():
    tokenizer = byte_tokenizer(CHATML, tokens=["<think>", "</think>"])
    codec = TextCodec(tokenizer)
    tokens = codec.encode(turns("u:q <think>", "a:<think>\nfirst<|im_end|>"))
    assert controls(tokenizer, tokens) == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<think>"]
    assert codec.opens_thinking(tokens)
    assert not codec.opens_thinking(codec.encode(turns("u:q", "a:<think>a</think>b")))


def test_an_unclosed_block_of_an_earlier_turn_is_over():
    codec = TextCodec(byte_tokenizer(CHATML, tokens=["<think>", "</think>"]))
    assert not codec.opens_thinking(codec.encode(turns("u:q", "a:<think>cut", "u:again")))


def test_gpt_oss_analysis_opened_by_the_prompt():
    codec = TextCodec(byte_tokenizer(CHATML, tokens=["<|channel|>", "<|message|>"]))
    tokenizer = codec._tokenizer
    assert codec.opens_thinking(tokenizer.encode("<|im_start|>assistant<|channel|>analysis<|message|>"))
    assert not codec.opens_thinking(tokenizer.encode("<|im_start|>assistant<|channel|>final<|message|>"))


# Threads


def test_eight_threads_at_once(monkeypatch):
    tokenizer = byte_tokenizer(STRICT, bos=True)
    codec = TextCodec(tokenizer)
    prompts = [f"{k} <s> " + "世界 🎉 " * k for k in range(40)]
    expected = [TextCodec(tokenizer).encode(prompt) for prompt in prompts]
    failures: list[object] = []
    # A tokenizer that two threads are in at once says so, however the interpreter switches.
    inside = threading.Lock()
    for name in ("encode", "decode", "apply_chat_template"):
        original = getattr(PreTrainedTokenizerFast, name)

        def guarded(self, *args, original=original, **options):
            outermost = not getattr(local, "inside", False)
            if outermost and not inside.acquire(blocking=False):
                raise RuntimeError("Already borrowed")
            local.inside = True
            try:
                return original(self, *args, **options)
            finally:
                if outermost:
                    local.inside = False
                    inside.release()

        monkeypatch.setattr(PreTrainedTokenizerFast, name, guarded)
    local = threading.local()

    def work() -> None:
        try:
            for prompt, tokens in zip(prompts, expected, strict=True):
                stream = codec.stream(["never"])
                text = "".join(stream.push(token) for token in tokens) + stream.finish()
                if codec.encode(prompt) != tokens or codec.decode(tokens) != text or prompt.strip() not in text:
                    failures.append(prompt)
                codec.encode_text(prompt)
        except Exception as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
