"""Episodes with several trajectories: what an executor may return, and which trajectories belong together."""

import pytest
from sessions import Scripted, decode, encode, prompt, run

from openrlhf.agents.branches import episode_numbers, last_of_episodes
from tests.samples import make_trajectory

# Each turn is a separate trajectory; {result} is what `execute` returns.
AGENT = """
    from openrlhf.utils.agent import AgentExecutorBase

    class AgentExecutor(AgentExecutorBase):
        async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
            turns = []
            for text in (prompt, "so: "):
                ids = hf_tokenizer(text, add_special_tokens=False)["input_ids"]
                output = (await llm_engine.generate(ids, sampling_params)).outputs[0]
                known = [step[token].logprob for token, step in zip(output.token_ids, output.logprobs)]
                turns.append({{
                    "observation_tokens": ids + output.token_ids,
                    "action_ranges": [(len(ids), len(ids) + len(output.token_ids))],
                    "rollout_log_probs": [0.0] * len(ids) + known,
                }})
            return {result}
"""
WHOLE = "(turns[0], {**turns[1], 'reward': 0.5, 'scores': 1, 'extra_logs': {'turns': 2}})"


def test_the_tokens_of_every_trajectory_are_those_of_the_engine(build, write):
    executor = build(agent_func_path=write(AGENT.format(result=WHOLE)))
    got = run(executor, [Scripted("ab", "2"), Scripted("c", "45")]).trajectories
    assert [decode(item.input_ids) for item in got] == ["1+1=ab", "so: 2", "1+1=c", "so: 45"]
    assert [item.input_ids.tolist() for item in got[:2]] == [encode("1+1=ab"), encode("so: 2")]
    assert [item.rollout_log_probs.tolist() for item in got[:2]] == [[0, 0, 0, 0, -1, -1], [0, 0, 0, 0, -2]]
    assert [item.action_mask.sum() for item in got] == [2, 1, 1, 2]
    assert [(item.episode, item.reward, item.score) for item in got] == [(0, 0.5, 1)] * 2 + [(1, 0.5, 1)] * 2
    assert [item.extra_logs for item in got] == [{}, {"turns": 2.0}] * 2


def test_a_list_of_one_is_an_ordinary_episode(build, write):
    executor = build(agent_func_path=write(AGENT.format(result="[{**turns[0], 'reward': 1.0}]")))
    (item,) = run(executor, [Scripted("a", "b")]).trajectories
    assert (item.episode, item.reward) == (None, 1.0)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("[]", "execute returned an empty list"),
        ("[turns[0], 3]", "execute returned [{'observation_tokens'"),
        ("[{**turns[0], 'reward': 1.0}, turns[1]]", "'reward' of the episode is None"),
        (
            "[{**turns[0], 'rollout_log_probs': None}, {**turns[1], 'reward': 1.0}]",
            "'rollout_log_probs' of trajectory 0 is None",
        ),
        ("[turns[0], {**turns[1], 'reward': 1.0}]", "returned 2 trajectories: expected one, because of --step_rewards"),
        ("[{**turns[0], 'action_ranges': []}, {**turns[1], 'reward': 1.0}]", "has no action within 64 tokens"),
    ],
)
def test_an_invalid_list_fails_its_sample(build, write, result, message):
    file = write(AGENT.format(result=result))
    executor = build(agent_func_path=file, on_reward_error="skip", step_rewards="--step_rewards" in message)
    (failure,) = run(executor, [Scripted("a", "b")]).failures
    assert message in str(failure)
    assert "sample 0 of prompt 7" in str(failure)


def test_trajectories_of_an_episode_count_once():
    def trajectory(index, episode, reward=0.0):
        return make_trajectory(prompt(index=index), (5, 7), (0, 1), reward=reward, episode=episode)

    items = [trajectory(0, None), trajectory(0, 1), trajectory(0, 1, 2.0), trajectory(1, 1), trajectory(1, None)]
    assert episode_numbers(items).tolist() == [0, 1, 1, 2, 3]
    assert last_of_episodes(items) == [items[0], items[2], items[3], items[4]]
    assert episode_numbers([]).tolist() == []
