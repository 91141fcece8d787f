"""A tokenizer in which every word and every space is one token, and a chat template of each kind.

STABLE templates only append, REWRITING ones change earlier turns, OPENING ones start the answer in the prompt, MARKING
ones mark the assistant's text with `generation` blocks, and TOOLS ones render tools and calls.
"""

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [
    "<eos>", "<pad>", "<unk>", " ", "\n", "User:", "Assistant:", "one", "two", "three", "four", "five", "six",
    "<user>", "<assistant>", "<system>", "<tool>", "<think>", "be", "kind", "ки", "+", "-", "call", "++",
]  # fmt: skip

STABLE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
REWRITING = (  # like Qwen3: drops the reasoning of earlier turns
    "{% for m in messages %}<{{ m.role }}> {% if m.reasoning is defined and loop.last %}<think> {{ m.reasoning }} "
    "{% endif %}{{ m.content }} <eos>\n{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
OPENING = STABLE.replace("<assistant> {% endif", "<assistant> <think> {% endif")  # like R1: the answer has no <think>
MARKING = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}{{ m.content }} <eos>"
    "{% endgeneration %}{% else %}{{ m.content }} <eos>{% endif %}{{ '\\n' }}{% endfor %}"
)
TOOLS = (
    "{% if tools %}{% for t in tools %}<tool> {{ t.name }} {% endfor %}{{ '\\n' }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}> {% for c in m.tool_calls or [] %}call {{ c.function.name }} {% endfor %}"
    "{{ m.content }} <eos>\n{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def word_tokenizer(chat_template=STABLE):
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|[^\s]+"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=chat_template,
    )


def merging_tokenizer():
    """Return a tokenizer of letters in which adjacent a and b merge into one token."""
    letters = ["<eos>", "<pad>", "a", "b", "c", "\n", " ", "ab"]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, [("a", "b")]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def decode_row(row):
    """Return the text of a row and the part of it that is learned."""
    words = [WORDS[number] for number in row.input_ids]
    learned = [word for word, is_target in zip(words, row.target_mask, strict=True) if is_target]
    return "".join(words), "".join(learned)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}
