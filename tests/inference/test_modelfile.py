"""Modelfiles: the Go template gives the text that the chat template gives."""

import re

import pytest

from openrlhf.errors import ConfigError
from openrlhf.inference.gguf.modelfile import ChatShape, modelfile, starts_with_bos
from openrlhf.training.prompt_format import PromptFormat
from tests.byte_models import CHATML, byte_level_tokenizer, sentencepiece_tokenizer

HEADERS = (  # like Llama 3's
    "{{ bos_token }}{% for m in messages %}{{ '<|h|>' + m['role'] + '<|/h|>\n\n' + m['content'] + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|h|>assistant<|/h|>\n\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (  # like Qwen 2.5's
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
)
BRACES = CHATML.replace("'<|im_end|>\n'", "' {{x}}<|im_end|>{'")
COUNTING = "{% for m in messages %}{{ loop.index ~ m['content'] }}{% endfor %}"
NO_SYSTEM = (  # like Gemma's
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}" + CHATML
)
CONVERSATIONS = [
    [("system", "Answer briefly."), ("user", "2+2?"), ("assistant", "4"), ("user", "3+3?")],
    [("user", "Hello"), ("assistant", "Hi"), ("user", "Bye")],
]


def run_go(template, turns):
    """Execute the part of Go's template language that Modelfiles use here."""
    loop, reply = re.fullmatch(
        r"\{\{ range \.Messages \}\}(.*)\{\{ end \}\}\{\{ end \}\}(.*)", template, re.DOTALL
    ).groups()
    branches = dict(re.findall(r'\{\{ (?:else )?if eq \.Role "(\w+)" \}\}(.*?)(?=\{\{ else if|\Z)', loop, re.DOTALL))
    text = "".join(branches[role].replace("{{ .Content }}", content) for role, content in turns) + reply
    return without_actions(text)


def without_actions(text):
    """Execute the actions that print braces; any others are left, so that a comparison fails."""
    return re.sub(r'\{\{ "(\{+)" \}\}', r"\1", text)


@pytest.mark.parametrize("template", [CHATML, HEADERS, DEFAULT_SYSTEM, BRACES])
def test_the_template_writes_what_the_chat_template_writes(template):
    tokenizer = sentencepiece_tokenizer() if "bos_token" in template else byte_level_tokenizer()
    tokenizer.chat_template = template
    text, complete = modelfile("model.gguf", tokenizer, PromptFormat(chat=True))
    assert complete
    assert text.startswith('FROM ./model.gguf\nTEMPLATE """')
    go = text.partition('"""')[2].partition('"""')[0]
    system = re.search(r'^SYSTEM """(.*)"""$', text, re.MULTILINE)
    bos = tokenizer.bos_token if starts_with_bos(tokenizer, PromptFormat(chat=True)) else ""
    for turns in CONVERSATIONS:
        messages = [{"role": role, "content": content} for role, content in turns]
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if system and turns[0][0] != "system":
            turns = [("system", system[1]), *turns]
        assert bos + run_go(go, turns) == expected
    assert f'PARAMETER stop "{tokenizer.eos_token}"' in text


@pytest.mark.parametrize("template", [COUNTING, NO_SYSTEM])
def test_templates_of_another_shape_are_left_to_the_gguf_file(template):
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    assert ChatShape.of(tokenizer, PromptFormat(chat=True)) is None
    text, complete = modelfile("model.gguf", tokenizer, PromptFormat(chat=True))
    assert not complete
    assert "TEMPLATE" not in text


def test_a_bos_token_that_starts_every_message_belongs_to_the_template():
    tokenizer = byte_level_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    assert not starts_with_bos(tokenizer, PromptFormat(chat=True))
    assert ChatShape.of(tokenizer, PromptFormat(chat=True)).before["system"] == "<|im_start|>system\n"


def test_input_templates_and_system_prompts_come_from_training():
    tokenizer = sentencepiece_tokenizer()
    text, complete = modelfile("model.gguf", tokenizer, PromptFormat(input_template="Q: {}\nA: "))
    assert complete
    assert text == 'FROM ./model.gguf\nTEMPLATE """Q: {{ .Prompt }}\nA: """\nPARAMETER stop "</s>"\n'
    assert not starts_with_bos(tokenizer, PromptFormat(input_template="Q: {}\nA: "))  # training adds none
    tokenizer = byte_level_tokenizer()
    text, _ = modelfile("model.gguf", tokenizer, PromptFormat(chat=True, system_prompt="Answer briefly."))
    assert 'SYSTEM """Answer briefly."""' in text


@pytest.mark.parametrize("template", ["{} again: {}\nA: ", "set {{}} of", "{{{{}}}}{", "{{ x }}{}"])
def test_every_placeholder_becomes_the_prompt_and_braces_stay_text(template):
    text, _ = modelfile("model.gguf", byte_level_tokenizer(), PromptFormat(input_template=template))
    go = text.partition('"""')[2].partition('"""')[0]
    pieces = go.split("{{ .Prompt }}")
    assert all(not piece.endswith("{") for piece in pieces)  # Go would read {{{ .Prompt }} as an action
    assert "PROMPT".join(without_actions(piece) for piece in pieces) == template.replace("{}", "PROMPT")


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        (PromptFormat(input_template='"""{}"""'), "the input template contains"),
        (PromptFormat(chat=True, system_prompt='Quote with """.'), "the system prompt contains"),
    ],
)
def test_three_quotes_cannot_be_in_a_modelfile(prompt, what):
    with pytest.raises(ConfigError, match=what):
        modelfile("model.gguf", byte_level_tokenizer(), prompt)


@pytest.mark.parametrize(
    ("eos", "line"),
    [
        ("</s>", 'PARAMETER stop "</s>"'),
        ("<\\s>", 'PARAMETER stop "<\\s>"'),
        ('<"s">', 'PARAMETER stop """<"s">"""'),
        ('</s>"\nFROM /etc/passwd', 'PARAMETER stop """</s>"\nFROM /etc/passwd"""'),
    ],
)
def test_a_stop_token_cannot_end_its_line(eos, line):
    """Ollama would run what follows as a command of the Modelfile."""
    tokenizer = byte_level_tokenizer()
    tokenizer.eos_token = eos
    text, _ = modelfile("model.gguf", tokenizer, PromptFormat(input_template="{}"))
    assert text.endswith(f"\n{line}\n")
