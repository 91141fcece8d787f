"""Any JSON in any column of a dataset gives rows, or an error that names the file, for every command."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.config.commands import BatchInferenceConfig
from openrlhf.config.sections.data import (
    ConversationFlags,
    LabelledResponseFlags,
    PairFlags,
    StepFlags,
    TemplateFlags,
)
from openrlhf.config.sections.rl import PromptFlags
from openrlhf.data.answers import read_answers, read_prompts
from openrlhf.data.preference import labelled_rows, preference_rows
from openrlhf.data.process import step_rows
from openrlhf.data.prompts import Budget, prompt_rows
from openrlhf.data.rows import Loaded
from openrlhf.data.sft import sft_rows
from openrlhf.data.sources import load_dataset_rows
from openrlhf.errors import ConfigError, DataError
from tests.data.chat_words import MARKING, REWRITING, STABLE, TOOLS, word_tokenizer
from tests.json_strategies import FUZZING, conversations, mostly, numbers, tools, values, words

PLAIN, CHAT = (
    TemplateFlags(input_template="User: {} "),
    TemplateFlags(apply_chat_template=True, system_prompt="be kind"),
)
LENGTH = 64
READERS = {
    "SFT": lambda *data: sft_rows(*data, ConversationFlags(output_key="output"), PLAIN, LENGTH),
    "SFT, chat": lambda *data: sft_rows(*data, ConversationFlags(), CHAT, LENGTH),
    "SFT, chat in two columns": lambda *data: sft_rows(*data, ConversationFlags(output_key="output"), CHAT, LENGTH),
    "SFT, all turns of a chat": lambda *data: sft_rows(*data, ConversationFlags(multiturn=True), CHAT, LENGTH),
    "pre-training": lambda *data: sft_rows(*data, ConversationFlags(pretrain_mode=True), PLAIN, LENGTH),
    "pairs": lambda *data: preference_rows(*data, PairFlags(prompt_key="input"), PLAIN, LENGTH, drop_long_prompts=True),
    "pairs, chat": lambda *data: preference_rows(*data, PairFlags(), CHAT, LENGTH, drop_long_prompts=False),
    "KTO": lambda *data: labelled_rows(*data, LabelledResponseFlags(output_key="output"), PLAIN, LENGTH),
    "KTO, chat": lambda *data: labelled_rows(*data, LabelledResponseFlags(), CHAT, LENGTH),
    "steps": lambda *data: step_rows(*data, StepFlags(placeholder_token="ки", reward_tokens=("+", "-")), LENGTH),
    "prompts": lambda *data: prompt_rows(*data, PromptFlags(label_key="label"), PLAIN, Budget(LENGTH)),
    "prompts, chat": lambda *data: prompt_rows(*data, PromptFlags(), CHAT, Budget(LENGTH)),
    "generation, chat": lambda *data: read_prompts(
        *data, BatchInferenceConfig(template=CHAT), first_index=0, budget=Budget(LENGTH)
    ),
    "scoring": lambda *data: read_answers(*data, BatchInferenceConfig(template=PLAIN)),
}
steps = st.lists(mostly(st.one_of(numbers, st.sampled_from("+-"))), max_size=2)


def rows(cells):
    """Return a strategy for rows whose main columns are mostly drawn from `cells`."""
    cells = mostly(cells)
    labels = st.one_of(st.sampled_from([0, 1]), st.sampled_from([["+"], [0.5]]), steps)
    return st.fixed_dictionaries(
        {"input": cells, "output": cells, "chosen": cells, "rejected": cells, "label": mostly(labels)},
        optional={"margin": numbers, "tools": mostly(tools), "index": values, "datasource": values},
    )


plain_rows, chat_rows, stepwise_rows = rows(words), rows(conversations), rows(st.just("one ки"))


def problem_of(read):
    """Return the message with which a function rejects its data; None if it returns rows."""
    try:
        loaded = read()
        assert loaded.rows if isinstance(loaded, Loaded) else loaded
    except (DataError, ConfigError) as error:
        return str(error)
    return None


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("name", READERS)
@FUZZING
@given(data=st.data(), template=st.sampled_from([STABLE, TOOLS, MARKING, REWRITING]))
def test_any_row_is_read_or_rejected_with_its_place(name, tmp_path, data, template):
    row = data.draw(chat_rows if "chat" in name else stepwise_rows if name == "steps" else plain_rows)
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    tokenizer = word_tokenizer(template)
    problem = problem_of(lambda: READERS[name](load_dataset_rows("data.jsonl", split="train"), tokenizer))
    assert problem is None or ("data.jsonl" in problem and "\n" not in problem and len(problem) < 1000)


@pytest.mark.slow(seconds=4)
@FUZZING
@given(content=st.one_of(st.binary(min_size=1, max_size=40), st.text(min_size=1, max_size=40).map(str.encode)))
def test_any_bytes_are_rows_or_rejected(tmp_path, content):
    (tmp_path / "data.jsonl").write_bytes(content)
    problem = problem_of(lambda: [record.row for record in load_dataset_rows("data.jsonl", split="train")])
    assert problem is None or "data.jsonl" in problem
