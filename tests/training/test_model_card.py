"""Model cards: true about the run, usable as they stand, and without secrets."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flag_values
from openrlhf.config.parser import parse
from openrlhf.inference.converted_card import gguf_card
from openrlhf.training.atomic_folder import exporting
from openrlhf.training.model_card import (
    NOT_REPRODUCED,
    Outcome,
    read_card,
    reproduction,
    training_card,
    warn_if_prompted_differently,
    write_card,
)
from openrlhf.training.prompt_format import PromptFormat
from tests.commands import as_argv, run_command
from tests.rl.toy_task import SMALL, make_prompts, task_flags
from tests.toy_data import ANSWERS, PAIRS, STEPS, answers, dataset_flags, pairs, steps, write_rows


def read(folder):
    return ModelCard.load(Path(folder) / "README.md")


def run_example(folder, capsys):
    """Execute the example code of a card; return what it prints."""
    code = re.search(r"```python\n(.*?)```", read(folder).text, re.DOTALL)[1]
    capsys.readouterr()
    exec(code, {})
    return capsys.readouterr().out


def test_the_card_of_a_run_is_complete(train, tmp_path, models, capsys):
    data = dataset_flags(tmp_path, answers(32), answers(8, seed=1))
    ran = train("train_sft", **data, **ANSWERS, save_hf_ckpt=True, save_steps=1, max_steps=2)
    card = read(ran.save_path)
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["openrlhf", "sft"]
    assert card.data.license == "other"
    assert "Fill in `license`" in card.text
    assert "base_model" not in card.data.to_dict()  # a folder is not a hub name
    assert "datasets" not in card.data.to_dict()
    assert f"`{models()}`" in card.text
    assert "32 rows" in card.text
    assert f"| eval gpt_loss | {ran.evaluation('eval gpt_loss')[-1]:.4g} |" in card.text
    assert f"| gpt_loss | {ran.train('gpt_loss')[-1]:.4g} |" in card.text
    assert "prompt = 'Your question='" in card.text  # the input template
    assert len(run_example(ran.save_path, capsys)) > 1
    of_step = read(ran.ckpt_path / "global_step1_hf").text
    assert "ckpt/global_step1_hf" in of_step
    assert "- Steps: 1\n" in of_step


def test_the_card_repeats_the_run(train, tmp_path):
    data = {"dataset": write_rows(tmp_path / "my rows.jsonl", answers(16))}
    ran = train("train_sft", **data, input_template="Q: {}\n'A' ", output_key="output", adam_betas=[0.8, 0.9])
    words = re.search(r"```bash\n(.*?)```", read(ran.save_path).text, re.DOTALL)[1]
    command, *argv = shlex.split(words.replace("\\\n", " "))[1:]
    again = flag_values(parse(COMMANDS[command], argv, environ={}))
    recorded = json.loads((ran.save_path / "run" / "config.json").read_text())["flags"]
    for name in NOT_REPRODUCED & again.keys():
        del again[name], recorded[name]
    assert json.loads(json.dumps(again)) == recorded


def test_the_card_says_where_held_out_rows_come_from(train, tmp_path):
    ran = train("train_sft", dataset=write_rows(tmp_path / "rows.jsonl", answers(20)), **ANSWERS, eval_size=0.25)
    card = read(ran.save_path).text
    assert "rows.jsonl`; 15 rows after preparation\n- Evaluation data: 5 rows held out of the data above by" in card
    assert "`--eval_size 0.25`" in card
    assert "    --eval_size 0.25" in card  # in the command that repeats the run


@pytest.mark.slow(seconds=2)
def test_an_adapter_inherits_license_and_base_and_its_example_runs(train, tmp_path, models, capsys):
    base = shutil.copytree(models(), tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: org/origin\n---\n# A base\n")
    rows = [{"input": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "B"}]}] * 8
    flags = {"apply_chat_template": True, "system_prompt": "be brief", "lora_rank": 2, "pretrain": str(base)}
    ran = train("train_sft", dataset=write_rows(tmp_path / "rows.jsonl", rows), **flags)
    card = read(ran.save_path)
    assert card.data.license == "apache-2.0"
    assert card.data.base_model == "org/origin"
    assert card.data.library_name == "peft"
    assert "lora" in card.data.tags
    assert "## License" not in card.text
    assert PromptFormat.from_metadata(card.data["prompt_format"]) == PromptFormat(chat=True, system_prompt="be brief")
    assert len(run_example(ran.save_path, capsys)) > 1
    merging = {"model_path": base, "lora_path": ran.save_path, "output_path": "merged", "param_dtype": "fp32"}
    run_command("lora_combiner", merging)
    merged = read("merged")
    assert merged.data.library_name == "transformers"
    assert merged.data.base_model == "org/origin"
    assert merged.data["prompt_format"] == card.data["prompt_format"]
    assert "openrlhf train_sft" in merged.text
    assert merged.text.count("## Versions") == 1
    assert run_example("merged", capsys) == run_example(ran.save_path, capsys)


def test_reward_models_score_in_their_examples(train, tmp_path, capsys):
    for name, prefix in (("plain", "score"), ("named", "value_head")):
        data = {"dataset": write_rows(tmp_path / "pairs.jsonl", pairs(16))}
        ran = train("train_rm", name, **data, **PAIRS, value_head_prefix=prefix)
        assert read(ran.save_path).data.pipeline_tag == "text-classification"
        printed = (float(run_example(ran.save_path, capsys)) - ran.config["mean"]) / ran.config["std"]
        rows = write_rows(tmp_path / "rows.jsonl", [{"input": "Your question", "output": "An answer"}])
        scoring = {"eval_task": "rm", "pretrain": str(ran.save_path), "dataset": rows, "output_path": "scored.jsonl"}
        run_command("batch_inference", scoring | {"input_template": PAIRS["input_template"]})
        assert printed == pytest.approx(json.loads(Path("scored.jsonl").read_text())["reward"], abs=1e-4)
        Path("scored.jsonl").unlink()


def test_process_reward_models_judge_steps_in_their_examples(train, tmp_path, capsys):
    ran = train("train_prm", dataset=write_rows(tmp_path / "steps.jsonl", steps(16)), **STEPS)
    probabilities = json.loads(run_example(ran.save_path, capsys))
    assert len(probabilities) == 2
    assert all(0 < value < 1 for value in probabilities)


def test_policies_and_critics_have_cards(tmp_path, models):
    flags = SMALL | {"advantage_estimator": "gae", "max_steps": 1, "save_value_network": True}
    run_command(
        "train_ppo", flags | task_flags(tmp_path, make_prompts(8)) | {"pretrain": models(), "save_path": "./rl"}
    )
    policy, critic = read("rl"), read("rl_critic")
    assert "reinforcement learning (PPO)" in policy.text
    assert policy.data.tags == ["openrlhf", "ppo"]
    assert "8 prompts" in policy.text
    assert "- Steps: 1" in policy.text
    assert critic.data.pipeline_tag == "text-classification"
    assert "This is a critic" in critic.text


def config_of(command, **flags):
    return parse(COMMANDS[command], as_argv(flags), environ={})


@pytest.mark.parametrize(
    ("template", "flags", "told"),
    [
        ("Q: {} A: ", "", "with the input template 'Q: {} A: ', but this run prompts it with the input template '{}'"),
        ("Q: {} A: ", "--input_template 'Q: {} A: '", ""),
        ("{}", "", ""),  # plain text, as without a template
        (None, "", "with the chat template, but this run prompts it with the input template '{}'. Try: --apply_chat"),
    ],
)
def test_a_run_that_prompts_a_model_differently_from_its_training_is_warned(template, flags, told, tmp_path, capsys):
    form = PromptFormat(chat=template is None, input_template=template)
    ModelCard(f"---\n{yaml.safe_dump({'prompt_format': form.metadata()})}---\n# model\n").save(tmp_path / "README.md")
    argv = ["--pretrain", str(tmp_path), *shlex.split(flags)]
    warn_if_prompted_differently(parse(COMMANDS["train_ppo"], argv, environ={}))
    said = capsys.readouterr().err
    assert told in said
    assert bool(said) == bool(told)


def test_secrets_and_outputs_are_not_in_the_card():
    config = config_of(
        "train_ppo",
        pretrain="org/model",
        prompt_data="org/data",
        remote_rm_url="https://me:hidden1@host/score",
        reward_api_key="hidden2",
        use_wandb="hidden3",
        use_trackio="my project",
        save_path="/home/me/out",
        push_to_hub="org/result",
    )
    text = str(training_card(config, Outcome(rows=1)))
    assert "https://***@host/score" in text
    assert not any(secret in text for secret in ("hidden1", "hidden2", "hidden3", "/home/me", "my project"))
    assert "path = 'org/result'" in text


def test_hub_names_are_in_the_metadata():
    config = config_of(
        "train_dpo", pretrain="org/model@v1", dataset="org/data@part,./rows.jsonl", dataset_revision="main"
    )
    text = str(training_card(config, Outcome(rows=1)))
    metadata = yaml.safe_load(text.split("---")[1])
    assert metadata["base_model"] == "org/model"
    assert metadata["datasets"] == ["org/data"]
    assert "at revision `main`" in text
    assert metadata["tags"] == ["openrlhf", "dpo"]


def test_a_template_that_was_switched_off_is_part_of_the_command():
    config = config_of("train_sft", pretrain="org/model", dataset="org/data", input_template="")
    assert "--input_template ''" in reproduction(config)


def test_a_card_that_cannot_be_made_is_reported_and_the_model_is_saved(tmp_path, capfd):
    def make():
        raise KeyError("something")

    write_card(tmp_path, make)
    assert "saved without a model card: KeyError: 'something'" in capfd.readouterr().err
    assert not (tmp_path / "README.md").exists()


def test_a_run_on_objects_of_a_program_is_not_shown_as_a_command():
    config = config_of("train_sft", pretrain="org/model", dataset="in memory (120 rows; 3fa9c1)")
    text = str(training_card(config, Outcome(rows=120)))
    assert "Repeat the run with" not in text
    assert "The run was started from Python" in text
    assert "--dataset 'in memory (120 rows; 3fa9c1)'" in text


def our_card(steps):
    config = config_of("train_sft", pretrain="org/model", dataset="org/data", input_template="")
    return training_card(config, Outcome(rows=1, step=steps))


def save_card(folder, steps):
    with exporting(folder) as aside:
        write_card(aside, lambda: our_card(steps))
    return (folder / "README.md").read_text()


def test_a_new_card_replaces_an_unchanged_one_and_keeps_an_edited_one(tmp_path, capfd):
    folder = tmp_path / "model"
    save_card(folder, 1)
    written = save_card(folder, 2)
    assert "- Steps: 2\n" in written
    assert sorted(path.name for path in folder.iterdir()) == ["README.md"]
    edited = written.replace("license: other", "license: mit")
    (folder / "README.md").write_text(edited)
    assert "- Steps: 3\n" in save_card(folder, 3)
    save_card(folder, 4)
    assert (folder / "README.md.old").read_text() == edited
    assert capfd.readouterr().err.count("is now README.md.old") == 1


@pytest.mark.parametrize(
    "text", ["# My project\n", "---\ntags: [gpt2]\n---\n# A base\n", "---\na: [b\n---\n", "---\ntags: 5\n---\n"]
)
def test_a_readme_that_is_not_our_card_is_kept(tmp_path, capfd, text):
    (tmp_path / "README.md").write_text(text)
    assert save_card(tmp_path, 1) == text
    assert (tmp_path / "README.openrlhf.md").exists()
    assert "- Steps: 1\n" in read_card(str(tmp_path)).text
    assert "is not a model card of OpenRLHF and is kept" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["---\nlicense: [mit\n---\n# A base\n", "# A base\n"])
def test_a_readme_without_readable_metadata_is_not_a_card(tmp_path, text, caplog):
    (tmp_path / "README.md").write_text(text)
    assert read_card(str(tmp_path)) is None
    assert not caplog.records


@pytest.mark.parametrize(
    "saved",
    [
        {"chat": "yes"},
        {"input_template": "Q: "},
        {"input_template": 3},
        {"chat": True, "chat_template_kwargs": "enable_thinking"},
        {"chat": True, "system": "be brief"},
        ["chat"],
    ],
)
def test_a_prompt_format_that_was_edited_into_nonsense_is_ignored(saved):
    assert PromptFormat.from_metadata(saved) is None


def test_a_converted_card_carries_over_our_card_and_only_the_metadata_of_others(tmp_path):
    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder in (ours, other):
        folder.mkdir()
    save_card(ours, 7)
    (other / "README.md").write_text("---\nlicense: mit\ntags: [chat]\n---\n# A base\n\n## Training\n\nOn secrets\n")
    card = gguf_card(tmp_path / "gguf", str(ours), None, "model.gguf", "f16")
    assert card.data["prompt_format"] == {}  # plain text
    assert PromptFormat.from_metadata(card.data["prompt_format"]) == PromptFormat()
    assert "- Steps: 7\n" in card.text
    card = gguf_card(tmp_path / "gguf", str(other), None, "model.gguf", "f16")
    assert card.data.license == "mit"
    assert card.data.tags == ["openrlhf", "chat", "gguf"]
    assert "On secrets" not in card.text
