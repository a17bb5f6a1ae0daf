"""Verification by a second model with a reward head."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_engine
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CTRLConfig,
    CTRLForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForTokenClassification,
)

from rksc_agents.errors import ConfigError, ModelLoadError
from rksc_agents.testing import scripted_tokenizer
from rksc_agents.types import Prompt, Verdict
from rksc_agents.verify.reward_model import RewardModelVerifier
from rksc_agents.verify.verifier import Claim, Verifier

TOKENIZER = scripted_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|end|>")
SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
TEXTS = ("2 + 2 = 4\nSo it is 4.", "5", "First\n\nthen this\nand a much longer last step, which ends here.\n", "4.", "")


def seeded(build: Any) -> Any:
    """A model whose random weights are large enough for its scores to differ."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(6.0)
    return model


def llama(labels: int = 1, pad: int | None = None) -> Any:
    config = LlamaConfig(**SHAPE, num_key_value_heads=2, num_labels=labels, pad_token_id=pad)
    return seeded(lambda: LlamaForSequenceClassification(config))


def qwen(labels: int = 2) -> Any:
    config = Qwen2Config(**SHAPE, num_key_value_heads=2, num_labels=labels, pad_token_id=None)
    return seeded(lambda: Qwen2ForTokenClassification(config))


def bert_tokenizer() -> PreTrainedTokenizerFast:
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *"0123456789+=.,?",
        *["What", "is", "So", "it", "First", "then", "this", "and", "a", "much"],
    ]
    raw = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens(words[:4])
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def bert(pad: int | None = 0) -> Any:
    config = BertConfig(**SHAPE | {"vocab_size": len(bert_tokenizer())}, num_labels=2, pad_token_id=pad)
    return seeded(lambda: BertForSequenceClassification(config))


def claims(*texts: str, question: Prompt = "What is 2 + 2?") -> list[Claim]:
    return [Claim(question, text, None, cast(Any, None)) for text in texts]


class Here:
    """Runs calls at once, in place of a session."""

    async def call(self, function: Any, *args: Any) -> Any:
        return function(*args)


def judge(verifier: RewardModelVerifier, *texts: str, question: Prompt = "What is 2 + 2?") -> list[Verdict]:
    return asyncio.run(verifier.verify(cast(Any, Here()), claims(*texts, question=question), None))


def scores(verifier: RewardModelVerifier, *texts: str, question: Prompt = "What is 2 + 2?") -> list[float]:
    return [cast(float, verdict.score) for verdict in judge(verifier, *texts, question=question)]


def chat(*turns: str, closed: bool = True) -> list[int]:
    """A conversation as the template of the scripted tokenizer writes it."""
    roles = ("user", "assistant")
    written = "".join(f"<|{roles[k % 2]}|>{text}<|end|>" for k, text in enumerate(turns))
    return cast(list[int], TOKENIZER.encode(written if closed else written.removesuffix("<|end|>")))


@torch.inference_mode()
def logits(model: PreTrainedModel, tokens: Sequence[int], **inputs: Any) -> torch.Tensor:
    """The oracle: the model's own forward on one row."""
    return cast(torch.Tensor, model(input_ids=torch.tensor([list(tokens)]), **inputs).logits[0])


def outside() -> Any:
    model = llama()
    model.config.pad_token_id = -1
    return model


def ctrl() -> Any:
    """A decoder whose own forward reads its head, and refuses several rows without a padding token."""
    config = CTRLConfig(
        vocab_size=len(TOKENIZER), n_positions=256, n_embd=32, dff=48, n_layer=2, n_head=4, num_labels=2
    )
    return seeded(lambda: CTRLForSequenceClassification(config))


CASES = {
    "Llama, one label": (llama, lambda: TOKENIZER),
    "Llama, two labels": (lambda: llama(2), lambda: TOKENIZER),
    "Llama, padding is the end token": (lambda: llama(pad=END), lambda: TOKENIZER),
    "Llama, padding outside the vocabulary": (outside, lambda: TOKENIZER),
    "CTRL, no padding token": (ctrl, lambda: TOKENIZER),
    "Qwen2, token head": (qwen, lambda: TOKENIZER),
    "BERT": (bert, bert_tokenizer),
    "BERT, no padding token": (lambda: bert(pad=None), bert_tokenizer),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("per", ["answer", "step"])
def test_a_padded_row_scores_what_it_scores_alone(case: str, per: Any) -> None:
    model, tokenizer = (make() for make in CASES[case])
    together = scores(RewardModelVerifier.from_model(model, tokenizer, per=per), *TEXTS)
    alone = [scores(RewardModelVerifier.from_model(model, tokenizer, per=per), text)[0] for text in TEXTS]
    assert together == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 3) for score in alone}) >= 3  # equal scores would show nothing


@pytest.mark.parametrize("batch_size", [1, 2, 3, 64])
def test_the_order_of_claims_and_the_batch_size_change_nothing(batch_size: int) -> None:
    model = llama()
    expected = scores(RewardModelVerifier.from_model(model, TOKENIZER), *TEXTS)
    verifier = RewardModelVerifier.from_model(model, TOKENIZER, batch_size=batch_size)
    assert scores(verifier, *TEXTS[::-1])[::-1] == pytest.approx(expected, abs=1e-5)
    assert judge(verifier) == []


def test_a_sequence_head_reads_the_finished_conversation() -> None:
    tokens = chat("What is 2 + 2?", "It is 4.")
    assert tokens[-1] == END
    one, two = llama(), llama(2)
    verdict = judge(RewardModelVerifier.from_model(one, TOKENIZER), "It is 4.")[0]
    assert verdict.score == pytest.approx(float(logits(one, tokens).sigmoid()), abs=1e-5)
    assert (verdict.layers, verdict.tokens_computed, verdict.exit_layer) == (3, len(tokens), None)
    probabilities = logits(two, tokens).softmax(-1)
    assert scores(RewardModelVerifier.from_model(two, TOKENIZER), "It is 4.") == pytest.approx(
        [float(probabilities[1])]
    )
    first = RewardModelVerifier.from_model(two, TOKENIZER, positive=0)
    assert scores(first, "It is 4.") == pytest.approx([float(probabilities[0])], abs=1e-5)


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_claim_is_an_empty_turn(text: str) -> None:
    model = llama()
    expected = float(logits(model, chat("What is 2 + 2?", "")).sigmoid())
    assert scores(RewardModelVerifier.from_model(model, TOKENIZER), text) == pytest.approx([expected], abs=1e-5)


def test_a_head_is_read_where_the_models_own_forward_reads_it() -> None:
    model = llama(pad=END)  # the last token is the padding token, which transformers passes over
    expected = [float(logits(model, chat("What is 2 + 2?", text)).sigmoid()) for text in TEXTS[:4]]
    assert scores(RewardModelVerifier.from_model(model, TOKENIZER), *TEXTS[:4]) == pytest.approx(expected, abs=1e-5)


def test_a_conversation_is_judged_as_a_whole_and_its_last_turn_continued() -> None:
    model = llama()
    verifier = RewardModelVerifier.from_model(model, TOKENIZER)
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "2 + 2?"},
    ]
    expected = float(logits(model, chat("Hello", "Hi", "2 + 2?", "4.")).sigmoid())
    assert scores(verifier, "4.", question=turns) == pytest.approx([expected], abs=1e-5)
    begun = [*turns, {"role": "assistant", "content": "It is "}]
    expected = float(logits(model, chat("Hello", "Hi", "2 + 2?", "It is 4.")).sigmoid())
    assert scores(verifier, "4.", question=begun) == pytest.approx([expected], abs=1e-5)


def test_steps_of_a_sequence_head_are_prefixes() -> None:
    model = llama()
    text = "One.\n\n Two.\nThree.\n"
    prefixes = [chat("What is 2 + 2?", prefix) for prefix in ("One.", "One.\n\n Two.", "One.\n\n Two.\nThree.")]
    steps = [float(logits(model, tokens).sigmoid()) for tokens in prefixes]
    assert len({round(step, 4) for step in steps}) == 3
    for aggregate, expected in (
        ("last", steps[-1]),
        ("min", min(steps)),
        ("mean", sum(steps) / 3),
        ("product", math.prod(steps)),
    ):
        verifier = RewardModelVerifier.from_model(model, TOKENIZER, per="step", aggregate=aggregate)
        verdict = judge(verifier, text)[0]
        assert verdict.score == pytest.approx(expected, abs=1e-5)
        assert verdict.tokens_computed == sum(map(len, prefixes))


def test_steps_of_a_token_head_are_read_at_their_separators() -> None:
    model = qwen()
    head = [*chat("What is 2 + 2?"), TOKENIZER.convert_tokens_to_ids("<|assistant|>")]
    tokens = [*head, *TOKENIZER.encode("One.\n Two.\nThree.\n")]
    newline = TOKENIZER.encode("\n")[0]
    ends = [k for k, token in enumerate(tokens) if token == newline]
    steps = logits(model, tokens).softmax(-1)[ends, 1].tolist()
    assert len(steps) == 3
    for per, aggregate, expected in (
        ("step", "min", min(steps)),
        ("step", "product", math.prod(steps)),
        ("step", "last", steps[-1]),
        ("answer", "min", steps[-1]),
    ):
        verifier = RewardModelVerifier.from_model(model, TOKENIZER, per=per, aggregate=aggregate)
        for text in ("One.\n Two.\nThree.", "One.\n Two.\n\nThree.\n"):  # the last separator may be missing
            verdict = judge(verifier, text)[0]
            assert verdict.score == pytest.approx(expected, abs=1e-5)
            assert verdict.tokens_computed == len(tokens)


def test_a_separator_may_be_a_control_token_of_the_reward_model() -> None:
    model = qwen()
    verifier = RewardModelVerifier.from_model(model, TOKENIZER, per="step", separator="<|tool|>", aggregate="mean")
    tokens = TOKENIZER.encode("<|user|>What is 2 + 2?<|end|><|assistant|>One.<|tool|>Two.<|tool|>")
    ends = [k for k, token in enumerate(tokens) if token == TOKENIZER.convert_tokens_to_ids("<|tool|>")]
    expected = logits(model, tokens).softmax(-1)[ends, 1].mean()
    assert scores(verifier, "One.<|tool|>Two.") == pytest.approx([float(expected)], abs=1e-5)


def test_a_pair_of_texts_for_a_model_without_a_template() -> None:
    model, tokenizer = bert(), bert_tokenizer()
    encoded = tokenizer("What is 2 + 2?", "So it is 4 .", return_tensors="pt")
    with torch.inference_mode():
        expected = float(model(**encoded).logits[0].softmax(-1)[1])
    verdict = judge(RewardModelVerifier.from_model(model, tokenizer), "So it is 4 .")[0]
    assert verdict.score == pytest.approx(expected, abs=1e-5)
    assert verdict.tokens_computed == encoded["input_ids"].shape[1]
    assert int(encoded["token_type_ids"].sum()) > 0


def test_a_blank_line_between_the_texts_where_there_is_no_separator_token() -> None:
    tokenizer = scripted_tokenizer()
    tokenizer.chat_template = None
    model, steps = llama(), qwen()
    expected = float(logits(model, tokenizer.encode("What is 2 + 2?\n\nIt is 4.")).sigmoid())
    assert scores(RewardModelVerifier.from_model(model, tokenizer), "It is 4.") == pytest.approx([expected], abs=1e-5)
    expected = float(logits(steps, tokenizer.encode("What is 2 + 2?\n\nIt is 4.\n")).softmax(-1)[-1, 1])
    assert scores(RewardModelVerifier.from_model(steps, tokenizer), "It is 4.") == pytest.approx([expected], abs=1e-5)


def encoder_case() -> tuple[Any, Any, str]:
    return bert(), bert_tokenizer(), "[SEP]"


@pytest.mark.parametrize(
    "case",
    [lambda: (llama(), TOKENIZER, "<|end|>"), lambda: (qwen(), TOKENIZER, "<|end|>"), encoder_case],
    ids=["sequence", "token", "pair"],
)
def test_text_never_becomes_control_tokens(case: Any) -> None:
    model, tokenizer, control = case()
    seen: list[list[int]] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].tolist()))
    verifier = RewardModelVerifier.from_model(model, tokenizer)
    scores(verifier, "4", question="2")
    scores(verifier, f"4 {control} 4", question=f"2 {control}")
    number = tokenizer.convert_tokens_to_ids(control)
    assert seen[0].count(number) == seen[-1].count(number) > 0
    assert len(seen[-1]) > len(seen[0])


def test_a_claim_that_is_too_long_is_refused_with_both_numbers() -> None:
    tokens = len(chat("What is 2 + 2?", "x" * 300))
    with pytest.raises(ConfigError, match=rf"{tokens} tokens .* 256"):
        judge(RewardModelVerifier.from_model(llama(), TOKENIZER), "4", "x" * 300)
    exact = len(chat("What is 2 + 2?", "x" * 50))
    assert judge(RewardModelVerifier.from_model(llama(), TOKENIZER, max_length=exact), "x" * 50)
    with pytest.raises(ConfigError, match=f"{exact - 1}"):
        judge(RewardModelVerifier.from_model(llama(), TOKENIZER, max_length=exact - 1), "x" * 50)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("per", "token"),
        ("aggregate", "max"),
        ("separator", ""),
        ("positive", 2),
        ("positive", -1),
        ("positive", True),
        ("batch_size", 0),
        ("batch_size", 1.5),
        ("max_length", 0),
        ("max_length", 257),
    ],
)
def test_bad_options_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        RewardModelVerifier.from_model(llama(2), TOKENIZER, **{option: value})


def test_models_that_cannot_verify_are_refused() -> None:
    config = LlamaConfig(**SHAPE, num_key_value_heads=2)
    with pytest.raises(ConfigError, match="no reward head"):
        RewardModelVerifier.from_model(LlamaForCausalLM(config), TOKENIZER)
    with pytest.raises(ConfigError, match="training mode"):
        RewardModelVerifier.from_model(llama().train(), TOKENIZER)
    with pytest.raises(TypeError, match="aggregat"):
        RewardModelVerifier.from_model(llama(), TOKENIZER, aggregat="min")
    model = llama()
    verifier = RewardModelVerifier.from_model(model, TOKENIZER)
    model.train()
    with pytest.raises(ConfigError, match="training mode"):
        judge(verifier, "4")


def test_a_score_that_is_no_number_is_refused() -> None:
    model = llama()
    model.score.weight.data[:] = torch.nan
    with pytest.raises(ConfigError, match="float32"):
        judge(RewardModelVerifier.from_model(model, TOKENIZER), "4")


def test_a_template_that_hides_the_end_of_a_turn_warns() -> None:
    tokenizer = scripted_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + m['content'] | upper }}{% endfor %}"
    with pytest.warns(UserWarning, match="how a turn of the assistant ends"):
        RewardModelVerifier.from_model(llama(), tokenizer)


def test_it_verifies_outside_the_engines_thread_for_several_requests() -> None:
    model = llama()
    inside: list[int] = []
    most: list[int] = []

    def enter(*_: Any) -> None:
        inside.append(1)
        most.append(len(inside))

    model.model.register_forward_pre_hook(enter)
    model.model.register_forward_hook(lambda *_: inside.pop() and None)
    verifier = RewardModelVerifier.from_model(model, TOKENIZER, batch_size=1)
    assert isinstance(verifier, Verifier)
    expected = scores(verifier, *TEXTS)
    with tiny_engine(tiny_model("Llama")) as engine:
        jobs = [engine.submit(lambda session: verifier.verify(session, claims(*TEXTS), None)) for _ in range(4)]
        for job in jobs:
            assert [verdict.score for verdict in job.result(timeout=60)] == pytest.approx(expected, abs=1e-5)
    assert max(most) == 1  # one pass at a time


# -- loading ----------------------------------------------------------------------------------------


def saved(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase = TOKENIZER) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_head_is_chosen_by_the_architectures(tmp_path: Path) -> None:
    for model, kind in ((llama(2), "sequence"), (qwen(), "token")):
        folder = saved(tmp_path / kind, model)
        expected = scores(RewardModelVerifier.from_model(model, TOKENIZER, aggregate="min", per="step"), *TEXTS)
        for given in ("auto", kind):
            verifier = RewardModelVerifier.from_pretrained(
                folder, kind=cast(Any, given), device="cpu", aggregate="min", per="step"
            )
            assert scores(verifier, *TEXTS) == pytest.approx(expected, abs=1e-5)
            assert verifier.name == f"reward-model:{folder}"
    assert RewardModelVerifier.from_pretrained(str(folder), device="cpu", name="judge").name == "judge"


def test_a_model_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE, num_key_value_heads=2)
    folder = saved(tmp_path / "causal", LlamaForCausalLM(config))
    with pytest.raises(ModelLoadError, match=r"LlamaForCausalLM.*none has a"):
        RewardModelVerifier.from_pretrained(folder, device="cpu")
    with pytest.raises(ModelLoadError, match=r"score\.weight"):  # transformers would fill it with random numbers
        RewardModelVerifier.from_pretrained(folder, kind="sequence", device="cpu")


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no"):
        RewardModelVerifier.from_pretrained(tmp_path / "missing")
    with pytest.raises(ConfigError, match="kind = 'causal'"):
        RewardModelVerifier.from_pretrained(tmp_path, kind=cast(Any, "causal"))
    folder = saved(tmp_path / "good", llama())
    with pytest.raises(ConfigError, match="'aggregat' is no argument"):
        RewardModelVerifier.from_pretrained(folder, device="cpu", aggregat="min")
    with pytest.raises(ConfigError, match="CUDA devices"):
        RewardModelVerifier.from_pretrained(folder, device="cuda:99")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):  # pickled weights can run any code
        RewardModelVerifier.from_pretrained(folder, device="cpu")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": None}))
    save_file({}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match="architectures none"):
        RewardModelVerifier.from_pretrained(folder, device="cpu")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="GGUF"):
        RewardModelVerifier.from_pretrained(file, device="cpu")
