"""An agent may change the sampling of its turns: training scores each token as it was sampled, or stops."""

import numpy as np
import pytest

from tests.commands import FinishedRun, run_command
from tests.rl.toy_task import SMALL, make_prompts, read_rollouts
from tests.toy_data import write_rows

AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Instance(AgentInstanceBase):
    turn = 0
    async def step(self, states, **kwargs):
        self.turn += 1
        params = states["sampling_params"].clone()
        params.CHANGE
        letters = sum(letter.islower() for letter in states["action_text"])
        return {"rewards": letters / 8, "done": self.turn == 2, "environment_feedback": "+", "sampling_params": params}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Instance)
"""


@pytest.fixture
def train_agent(tmp_path, models):
    def start(change, **flags):
        (tmp_path / "agent.py").write_text(AGENT.replace("CHANGE", change))
        given = {
            "pretrain": models(),
            "save_path": "./out",
            "ckpt_path": "./out_ckpt",
            "prompt_data": write_rows(tmp_path / "prompts.jsonl", make_prompts(8)),
            "agent_func_path": str(tmp_path / "agent.py"),
            "rollout_batch_size": 4,
            "train_batch_size": 8,  # of 16 samples
            "max_len": 32,
            "max_new_tokens": 6,
        }
        run_command("train_ppo", SMALL | given | flags)
        return FinishedRun(tmp_path / "out", tmp_path / "out_ckpt")

    return start


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("more", [{}, {"packing_samples": True, "entropy_loss_coef": 0.01}])
def test_tokens_are_scored_at_the_temperature_of_their_turn(train_agent, more):
    ran = train_agent("temperature = 2.5", temperature=0.7, enable_vllm_is_correction=True, init_kl_coef=0.1, **more)
    assert max(abs(kl) for kl in ran.train("engine_kl")) < 1e-5
    assert abs(ran.train("kl")[0]) < 1e-5  # the policy still equals the reference, at any temperature
    rows, factor = read_rollouts(ran, 2), float(np.float32(2.5 / 0.7))
    for row in rows:
        assert row["old_log_probs"] == pytest.approx(row["rollout_log_probs"], abs=1e-5)
        assert set(row["temperature_factors"] or ()) <= {1.0, factor}
    assert any(factor in (row["temperature_factors"] or ()) for row in rows)


def test_a_turn_with_a_truncated_vocabulary_is_rejected_before_training(train_agent, capsys):
    with pytest.raises(SystemExit):
        train_agent("top_p = 0.9", enable_vllm_is_correction=True)
    stderr = capsys.readouterr().err
    assert "in the test with made-up answers before training" in stderr
    assert "sampling_params.top_p=0.9 changes the sampling distribution" in stderr
    assert "Try: leave top_p unchanged, or --enable_vllm_is_correction false" in stderr


@pytest.mark.slow(seconds=2)
def test_turns_of_a_run_with_a_truncated_vocabulary_are_corrected(train_agent):
    """The engine then returns log-probs over the whole vocabulary, which agree with the trainer's."""
    ran = train_agent("max_tokens = 4", top_p=0.8, enable_vllm_is_correction=True)
    assert max(abs(kl) for kl in ran.train("engine_kl")) < 1e-5
    assert all(row["whole_vocabulary"] for row in read_rollouts(ran, 1))


@pytest.mark.slow(seconds=2)
def test_without_correction_a_truncated_vocabulary_is_recorded(train_agent):
    ran = train_agent("top_p = 0.9")
    assert not any(row["whole_vocabulary"] for row in read_rollouts(ran, 1))
