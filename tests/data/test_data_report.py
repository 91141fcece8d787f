"""Reports about rows: dropped, truncated, or not worth training on."""

import pytest

from openrlhf.config.commands import DPOConfig, KTOConfig, LocalRLConfig, SFTConfig
from openrlhf.config.sections.data import (
    ConversationFlags,
    DatasetFlags,
    LabelledResponseFlags,
    PairFlags,
    TemplateFlags,
)
from openrlhf.config.sections.rl import PromptFlags, RewardFlags
from openrlhf.data.prompts import load_prompts
from openrlhf.data.supervised import load_data
from openrlhf.errors import DataError
from tests.data.chat_words import word_tokenizer
from tests.toy_data import write_rows

PLAIN = TemplateFlags(input_template="User: {} Assistant: ")
SFT = ConversationFlags(output_key="output")


@pytest.fixture
def load(tmp_path):
    """Return a function that loads rows from a file."""

    def start(rows, command, max_len=100, tokenizer=None, **sections):
        data = DatasetFlags(dataset=write_rows(tmp_path / "rows.jsonl", rows), max_len=max_len)
        config = command(data=data, **{"template": PLAIN, **sections})
        return load_data(config, tokenizer or word_tokenizer())

    return start


def question(words, answer="two"):
    return {"input": " ".join(["one"] * words), "output": answer}


def test_cut_rows_are_counted_with_their_tokens_and_a_length_that_keeps_them(load, capsys):
    rows = [question(1)] * 3 + [question(1, "two two two"), question(1, "two two two two two")]
    load(rows, SFTConfig, max_len=10, fields=SFT)
    assert (
        "rows.jsonl: rows longer than the 10 tokens that --max_len 10 allows: 2 of 5; 8 tokens are cut off at the end."
        " Try: --max_len 16, which keeps all of them whole"
    ) in capsys.readouterr().err


def test_a_length_that_keeps_almost_no_rows_is_rejected(load, capsys):
    rows = [question(1), *[question(words) for words in range(5, 25)]]
    with pytest.raises(DataError) as caught:
        load(rows, SFTConfig, max_len=12, fields=SFT)
    message = str(caught.value)
    assert "almost no rows would remain: 20 of 21 are dropped: 20 with a prompt of 10 tokens or more" in message
    assert message.endswith("Try: --max_len 52, which keeps 95% of them whole")
    load([question(1), *[question(5)] * 9], SFTConfig, max_len=12, fields=SFT)
    assert "dropped 9 of 10 rows" in capsys.readouterr().err


def test_every_run_shows_its_first_row(load, capsys):
    load([question(1), question(2)], SFTConfig, fields=SFT)
    first = "openrlhf: the first row, 8 tokens: 'User:   one   Assistant:  [[ two <eos>]]'\n"
    assert first in capsys.readouterr().err


def test_unused_prompts_and_empty_responses_of_pairs_are_reported(load, capsys):
    pairs = [{"prompt": "one", "chosen": "two", "rejected": ""}, {"prompt": "one", "chosen": "two", "rejected": "six"}]
    load(pairs, DPOConfig, fields=PairFlags())
    stderr = capsys.readouterr().err
    assert "responses are trained on without their prompts. Try: --prompt_key prompt" in stderr
    assert "1 of 2 pairs have a side with an empty response" in stderr
    load(pairs[1:], DPOConfig, fields=PairFlags(prompt_key="prompt"))
    assert "Try:" not in capsys.readouterr().err


def test_labels_that_are_all_equal_are_reported(load, capsys):
    rows = [{**question(words), "label": 1} for words in (1, 2)]
    load(rows, KTOConfig, fields=LabelledResponseFlags(output_key="output"))
    assert "all 2 responses are desirable" in capsys.readouterr().err


def test_a_template_without_eos_is_reported(load, capsys):
    endless = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <tool>{% endfor %}"
    marking = endless.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    chat = [{"input": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}]
    template = TemplateFlags(apply_chat_template=True)
    load(chat, SFTConfig, fields=ConversationFlags(), template=template, tokenizer=word_tokenizer(marking))
    assert "1 of 1 rows do not train on an EOS token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rewards", "warns"),
    [
        (RewardFlags(remote_rm_url="reward.py"), True),
        (RewardFlags(reward_pretrain="./reward"), False),
        (RewardFlags(agent_func_path="agent.py", reward_pretrain="./reward"), True),
    ],
)
def test_empty_labels_are_reported_unless_only_models_score(rewards, warns, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", [{"input": "one", "answer": "two"}])
    load_prompts(LocalRLConfig(prompts=PromptFlags(prompt_data=rows), rewards=rewards), word_tokenizer())
    assert ("Try: --label_key answer" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    ("row", "fields", "template", "complaint"),
    [
        (
            {"input": "one"},
            ConversationFlags(),
            TemplateFlags(apply_chat_template=True),
            "expected a message list, got the text 'one'. Try: --output_key FIELD for the response",
        ),
        (
            {"input": [{"role": "user", "content": "one"}], "output": "two"},
            SFT,
            PLAIN,
            "expected text, got a list of 1. Try: --apply_chat_template",
        ),
    ],
)
def test_text_and_messages_in_the_wrong_place_get_a_remedy(load, row, fields, template, complaint):
    with pytest.raises(DataError) as caught:
        load([row], SFTConfig, fields=fields, template=template)
    assert complaint in str(caught.value)
