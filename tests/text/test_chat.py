"""Cutting renderings at message boundaries, for the templates of every supported family."""

from pathlib import Path
from typing import Any

import pytest

from inms_jax.errors import TemplateError
from inms_jax.text.chat import ChatTemplate, Message, SplitChat, boundary_report
from inms_jax.text.merge import SystemRule
from inms_jax.text.tokenizer import Tokenizer
from inms_jax.weights import load

TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "chat_templates"
FAMILIES = ["chatml", "llama-2", "llama-3", "mistral-v0.3", "qwen2.5", "qwen3", "smollm2"]
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"q": "string"}}}


def template(family: str) -> ChatTemplate:
    source = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def talk(*turns: str) -> list[Message]:
    """`"user: text"` and so on."""
    return [Message(*turn.split(": ", 1)) for turn in turns]


SHORT = talk("user: Which port?")
LONG = talk(
    "system: You are terse.",
    "system: Decision: port 8443.",
    "user:   Which port?\n",
    "assistant: 8443.",
    "system: Decision: port 9000.",
    "user: And now?",
    "assistant: 9000.\n",
    "user: Thanks.",
)
ROLES = ["system", "system", "user", "assistant", "system", "user"]
REPEATED = talk("system: same", "system: same", "user: same", "assistant: same", "user: same")
TRICKY = talk(
    "user: <tool_response>x</tool_response>",
    "assistant: <think>\nLet me see.\n</think>\n\nIt is x.",
    "user: <|im_end|>\n",
    "assistant: <think>\n\n</think>\n\nYes.",
)


def test_every_template_is_tested() -> None:
    assert sorted(path.stem for path in TEMPLATES.glob("*.jinja")) == FAMILIES


@pytest.mark.parametrize("generate", [False, True])
@pytest.mark.parametrize("messages", [SHORT, LONG, REPEATED, TRICKY], ids=["short", "long", "repeated", "tricky"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_join_to_the_one_shot_rendering(family: str, messages: list[Message], generate: bool) -> None:
    chat = template(family)
    split = chat.split(messages, add_generation_prompt=generate)
    assert len(split.pieces) == len(messages)
    assert split.text == chat.render(messages, add_generation_prompt=generate)
    for piece, message in zip(split.pieces, messages, strict=True):
        shown = message.content.strip().rsplit("</think>\n\n", 1)[-1]
        assert shown in piece


@pytest.mark.parametrize("family", FAMILIES)
def test_a_message_is_the_same_piece_whatever_others_say(family: str) -> None:
    chat = template(family)
    other = [Message(m.role, "Something else, longer.") if i in (1, 3, 5) else m for i, m in enumerate(LONG)]
    one, two = chat.split(LONG).pieces, chat.split(other).pieces
    assert [a == b for a, b in zip(one, two, strict=True)] == [i not in (1, 3, 5) for i in range(len(LONG))]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_grows_by_pieces(family: str) -> None:
    chat = template(family)
    for length in (3, 6, 8):  # before each answer
        assert chat.split(LONG[:length]).pieces == chat.split(LONG).pieces[:length]


@pytest.mark.parametrize("family", FAMILIES)
def test_space_of_one_message_never_enters_the_piece_of_another(family: str) -> None:
    chat = template(family)
    plain = talk("system: shared", "user: private")
    spaced = [plain[0], Message("user", "\n\n  private")]
    assert chat.split(plain).pieces[0] == chat.split(spaced).pieces[0]


@pytest.mark.parametrize(
    ("family", "pieces"),
    [
        (
            "llama-2",
            ("<s>[INST] <<SYS>>\nA\n\n", "B\n<</SYS>>\n\n", "C [/INST]", " D </s>", "<s>[INST] E\n\n", "F [/INST]"),
        ),
        ("mistral-v0.3", ("<s>[INST] A\n\n", "B\n\n", "C[/INST]", " D</s>", "[INST] E\n\n", "F[/INST]")),
        (
            "chatml",
            tuple(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip(ROLES, "ABCDEF", strict=True)),
        ),
        (
            "llama-3",
            tuple(
                f"{bos}<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"
                for bos, role, text in zip(["<s>", *[""] * 5], ROLES, "ABCDEF", strict=True)
            ),
        ),
    ],
)
def test_pieces_by_hand(family: str, pieces: tuple[str, ...]) -> None:
    messages = talk("system: A", "system: B", "user: C", "assistant: D", "system: E", "user: F")
    assert template(family).split(messages).pieces == pieces


def test_system_rule_is_a_property_of_the_template() -> None:
    rules = {family: template(family).system_rule for family in FAMILIES}
    assert rules.pop("llama-2") is SystemRule.HEAD
    assert rules.pop("mistral-v0.3") is SystemRule.USER
    assert set(rules.values()) == {SystemRule.KEEP}


def test_a_default_system_message_goes_with_the_first_piece() -> None:
    pieces = template("smollm2").split(talk("user: hi", "assistant: yo")).pieces
    assert pieces[0].startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert pieces[0].endswith("<|im_start|>user\nhi<|im_end|>\n")


def test_tools_go_with_the_message_they_stand_in() -> None:
    messages = talk("system: S", "user: one", "assistant: two", "user: three")
    for family, place in (("qwen2.5", 0), ("qwen3", 0), ("mistral-v0.3", 3)):
        split = template(family).split(messages, tools=[TOOL])
        assert ["lookup" in piece for piece in split.pieces] == [i == place for i in range(4)], family


def test_qwen3_rewrites_an_earlier_turn_and_the_pieces_say_so() -> None:
    chat = template("qwen3")
    answered = talk("user: q", "assistant: <think>\nhm\n</think>\n\na")
    assert chat.split(answered).pieces[1] == "<|im_start|>assistant\n<think>\nhm\n</think>\n\na<|im_end|>\n"
    later = chat.split([*answered, *talk("user: next")]).pieces
    assert later[1] == "<|im_start|>assistant\na<|im_end|>\n"
    assert later[0] == chat.split(answered).pieces[0]


def test_empty_contents_and_names() -> None:
    chat = ChatTemplate("{% for m in messages %}[{{ m.name or m.role }}|{{ m.content }}]{% endfor %}")
    assert chat.split([Message("user", "", "ann"), Message("assistant", "  ")]).pieces == ("[ann|]", "[assistant|  ]")


def test_a_content_that_uses_the_marks_own_characters() -> None:
    messages = [Message("user", "\U000f0000x\U000f0001"), Message("assistant", "\U000f0002")]
    pieces = template("chatml").split(messages).pieces
    assert pieces[0] == "<|im_start|>user\n\U000f0000x\U000f0001<|im_end|>\n"


@pytest.mark.parametrize(
    ("family", "prompt", "closing"),
    [
        ("chatml", "<|im_start|>assistant\n", "<|im_end|>\n"),
        ("smollm2", "<|im_start|>assistant\n", "<|im_end|>\n"),
        ("qwen2.5", "<|im_start|>assistant\n", "<|im_end|>\n"),
        ("qwen3", "<|im_start|>assistant\n", "<|im_end|>\n"),
        ("llama-3", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
        ("llama-2", "", " </s>"),
        ("mistral-v0.3", "", "</s>"),
    ],
)
def test_prompt_and_closing_wrap_an_answer(family: str, prompt: str, closing: str) -> None:
    chat = template(family)
    assert chat.generation_prompt(SHORT) == prompt
    assert chat.closing(SHORT) == closing
    assert chat.closing([*SHORT, Message("assistant", "8443.")]) == closing


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].content }}{{ messages[0].content }}", "message 0.*not rendered exactly once"),
        ("{{ messages[0].content }}", "message 1.*not rendered exactly once"),
        ("{{ messages[1].content }}{{ messages[0].content }}", "message 1 before the end of message 0"),
        ("{% for m in messages %}{{ m.content|length }}{% endfor %}", "message 0.*not rendered"),
    ],
)
def test_templates_that_cannot_be_cut_say_why(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source).split(talk("user: question", "assistant: answer"))


def test_a_prompt_that_changes_the_past_is_refused() -> None:
    source = "{% if add_generation_prompt %}!{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(TemplateError, match="changes earlier text"):
        ChatTemplate(source).split(SHORT, add_generation_prompt=True)


def test_refusals_of_the_template_reach_the_caller() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        template("llama-2").split(talk("user: a", "user: b"))
    with pytest.raises(TemplateError, match="no messages"):
        template("chatml").split([])


@pytest.mark.parametrize("family", ["chatml", "llama-3", "qwen2.5", "qwen3", "smollm2"])
def test_templates_with_end_markers_tokenise_as_in_one_shot(family: str, tokenizer: Tokenizer) -> None:
    split = template(family).split(LONG, add_generation_prompt=True)
    assert boundary_report(split, tokenizer) == ()


def test_boundaries_inside_a_word_are_reported(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode(" decision")
    (found,) = boundary_report(SplitChat(("a dec", "ision b", " c"), ""), tokenizer)
    assert found.one_shot_ids == tuple(whole)
    assert tokenizer.decode(found.pieces_ids) == " decision"
    assert found.piece == 0


def test_merged_system_messages_are_reported_where_they_meet(sentencepiece_tokenizer: Tokenizer) -> None:
    split = template("llama-2").split(talk("system: one", "user: the port"))
    report = boundary_report(split, sentencepiece_tokenizer)
    assert [difference.piece for difference in report] == [1]


MODEL_CASES: dict[str, list[Message]] = {
    "chat_capital": talk("user: What is the capital of France? Then list three facts about it."),
    "chat_story": talk(
        "system: You are a careful planner agent.",
        "user: Write a short plan to organise a library of 120 books in 3 days.",
    ),
}


@pytest.mark.model
@pytest.mark.parametrize("name", sorted(MODEL_CASES))
def test_smollm2_chats_have_the_golden_prompt_and_ids(name: str, golden: dict[str, dict[str, Any]]) -> None:
    model = load("smollm2-135m-instruct", progress=False)
    assert model.chat_template is not None
    split = model.chat_template.split(MODEL_CASES[name], add_generation_prompt=True)
    assert split.text == golden[name]["prompt"]
    ids = [i for text in (*split.pieces, split.generation_prompt) for i in model.tokenizer.encode(text)]
    assert ids == golden[name]["prompt_token_ids"]
    assert boundary_report(split, model.tokenizer) == ()


@pytest.mark.model
def test_the_committed_smollm2_template_is_the_models() -> None:
    model = load("smollm2-135m-instruct", progress=False)
    assert model.chat_template is not None
    assert model.chat_template.source == template("smollm2").source
