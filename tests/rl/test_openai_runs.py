"""A run of two steps trains an agent that uses the OpenAI client."""

import pytest
import torch
from safetensors.torch import load_file

from tests.commands import FinishedRun, run_command
from tests.rl.toy_task import SMALL, make_prompts, read_rollouts
from tests.tiny import make_tokenizer
from tests.toy_data import write_rows

AGENT = """
from openai import OpenAI

def run_agent(base_url, api_key, prompt, label):
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": prompt}]
    for more in ("and?", None):
        reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages += [reply, {"role": "user", "content": more}]
    letters = [message.content for message in messages[1::2]]
    return {"reward": sum(letter.islower() for text in letters for letter in text) / 8, "extra_logs": {"turns": 2}}
"""


@pytest.mark.slow(seconds=4)
def test_conversations_of_an_openai_client_are_trained_on(tmp_path, models):
    (tmp_path / "agent.py").write_text(AGENT)
    rows = write_rows(tmp_path / "prompts.jsonl", make_prompts(4))
    flags = {
        "pretrain": models(),
        "save_path": "./out",
        "ckpt_path": "./out_ckpt",
        "prompt_data": rows,
        "agent_func_path": str(tmp_path / "agent.py"),
        "rollout_batch_size": 2,
        "train_batch_size": 8,
        "max_len": 48,
        "max_new_tokens": 6,
    }
    run_command("train_ppo", SMALL | flags)
    ran = FinishedRun(tmp_path / "out", tmp_path / "out_ckpt")
    assert ran.train("turns") == [2.0, 2.0]
    tokenizer = make_tokenizer()
    for row in read_rollouts(ran, 1):
        text = tokenizer.decode(row["input_ids"])
        action_ids = [token for token, mask in zip(row["input_ids"], row["action_mask"], strict=True) if mask]
        other_ids = [token for token, mask in zip(row["input_ids"], row["action_mask"], strict=True) if not mask]
        assert text.startswith(f"<u>{row['prompt']['text']}<a>")
        assert tokenizer.decode(other_ids).replace("</s>", "") == f"<u>{row['prompt']['text']}<a><u>and?<a>"
        assert 2 <= len(action_ids) <= 12
    before, after = load_file(f"{models()}/model.safetensors"), load_file(ran.save_path / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)
