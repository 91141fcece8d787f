"""The rows of each supervised command, from its flags."""

import pytest

from openrlhf.config.commands import DPOConfig, KDConfig, KTOConfig, PRMConfig, RMConfig, SFTConfig
from openrlhf.config.sections.data import (
    ConversationFlags,
    DatasetFlags,
    LabelledResponseFlags,
    PairFlags,
    StepFlags,
    TeacherResponseFlags,
    TemplateFlags,
)
from openrlhf.config.sections.training import BatchFlags
from openrlhf.data.supervised import load_data
from openrlhf.errors import DataError
from openrlhf.types import LabelledRow, PairRow, StepRow, TokenRow
from tests.data.chat_words import assistant, decode_row, user, word_tokenizer
from tests.toy_data import write_rows

ROWS = {
    SFTConfig: {"input": "one", "output": "two"},
    KDConfig: {"input": "one", "output": "two"},
    RMConfig: {"prompt": "one ", "chosen": "two", "rejected": "three"},
    DPOConfig: {"prompt": "one ", "chosen": "two", "rejected": "three"},
    KTOConfig: {"input": "one", "output": "two", "label": 1},
    PRMConfig: {"input": "one ки", "label": ["+"]},
}
FIELDS = {
    SFTConfig: ConversationFlags(output_key="output"),
    KDConfig: TeacherResponseFlags(output_key="output"),
    RMConfig: PairFlags(prompt_key="prompt"),
    DPOConfig: PairFlags(prompt_key="prompt"),
    KTOConfig: LabelledResponseFlags(output_key="output"),
    PRMConfig: StepFlags(placeholder_token="ки", reward_tokens=("+", "-")),
}
KINDS = {
    SFTConfig: TokenRow,
    KDConfig: TokenRow,
    RMConfig: PairRow,
    DPOConfig: PairRow,
    KTOConfig: LabelledRow,
    PRMConfig: StepRow,
}


@pytest.mark.parametrize("command", ROWS)
def test_each_command_reads_its_rows(command, tmp_path):
    write_rows(tmp_path / "train.jsonl", [ROWS[command]] * 3)
    write_rows(tmp_path / "eval.jsonl", [ROWS[command]] * 5)
    data = DatasetFlags(dataset="train.jsonl", eval_dataset="eval.jsonl", eval_split="test", max_samples=2, max_len=64)
    got = load_data(command(data=data, fields=FIELDS[command]), word_tokenizer())
    assert {type(row) for row in (*got.train, *got.evaluation)} == {KINDS[command]}
    assert (len(got.train), len(got.evaluation)) == (2, 5)  # evaluation is never capped
    assert not got.soft_labels


def test_sft_defaults_give_the_documented_text(tmp_path):
    write_rows(tmp_path / "train.jsonl", [ROWS[SFTConfig]])
    config = SFTConfig(data=DatasetFlags(dataset="train.jsonl"), fields=FIELDS[SFTConfig])
    got = load_data(config, word_tokenizer())
    assert decode_row(got.train[0]) == ("User: one\nAssistant: two<eos>", "two<eos>")
    assert got.evaluation == []


def test_chat_flags_reach_the_rows(tmp_path):
    write_rows(tmp_path / "train.jsonl", [{"input": [user("one"), assistant("two")]}])
    template = TemplateFlags(apply_chat_template=True, system_prompt="be kind")
    config = SFTConfig(data=DatasetFlags(dataset="train.jsonl"), template=template)
    assert decode_row(load_data(config, word_tokenizer()).train[0])[0].startswith("<system> be kind <eos>")


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize(("count", "held"), [(1, 1), (99, 99), (250, 100), (10300, 103)])
def test_a_reward_model_without_eval_data_evaluates_on_the_first_training_rows(count, held, tmp_path, capsys):
    write_rows(tmp_path / "train.jsonl", [ROWS[RMConfig]] * count)
    got = load_data(RMConfig(data=DatasetFlags(dataset="train.jsonl"), fields=FIELDS[RMConfig]), word_tokenizer())
    assert len(got.train) == count
    assert got.evaluation == got.train[:held]
    assert f"the first {held} training row" in capsys.readouterr().err


def test_only_dpo_drops_long_prompts(tmp_path):
    write_rows(tmp_path / "train.jsonl", [ROWS[DPOConfig], {**ROWS[DPOConfig], "prompt": "one one one "}])
    data = DatasetFlags(dataset="train.jsonl", max_len=8)
    for command, count in ((DPOConfig, 1), (RMConfig, 2)):
        assert len(load_data(command(data=data, fields=FIELDS[command]), word_tokenizer()).train) == count


def test_mixing_follows_the_flags(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"input": "one", "output": "two"}] * 4)
    write_rows(tmp_path / "b.jsonl", [{"input": "three", "output": "four"}] * 4)

    def read(seed):
        data = DatasetFlags(dataset="a.jsonl,b.jsonl", dataset_probs="0.5,0.5")
        config = SFTConfig(data=data, fields=FIELDS[SFTConfig], batches=BatchFlags(seed=seed))
        return [decode_row(row)[1] for row in load_data(config, word_tokenizer()).train]

    assert read(1) == read(1)
    assert read(1) != read(2)
    assert {"two<eos>", "four<eos>"} == set(read(1))


def test_soft_labels_are_reported_and_must_be_consistent(tmp_path):
    write_rows(tmp_path / "soft.jsonl", [{"input": "one ки", "label": [0.5]}])
    write_rows(tmp_path / "hard.jsonl", [ROWS[PRMConfig]])

    def read(dataset, eval_dataset):
        data = DatasetFlags(dataset=dataset, eval_dataset=eval_dataset)
        return load_data(PRMConfig(data=data, fields=FIELDS[PRMConfig]), word_tokenizer())

    assert read("soft.jsonl", "soft.jsonl").soft_labels
    with pytest.raises(DataError, match=r"^soft.jsonl labels steps by probabilities, but hard.jsonl by tokens$"):
        read("soft.jsonl", "hard.jsonl")
