"""Games of the real GEM package: a built-in one, and one that a user's file registers."""

from pathlib import Path

import pytest
from sessions import Scripted, decode, encode, prompt, run

from openrlhf.errors import ConfigError
from openrlhf.types import Completion
from tests.tiny import make_tokenizer

pytestmark = pytest.mark.slow(seconds=2)
EXAMPLE = Path(__file__).parents[2] / "examples/agents/gem_game.py"
HIGHER = """
    import random

    import gem

    from openrlhf.utils.agent import GemAgentExecutor

    class Higher(gem.Env):
        def reset(self, seed=None):
            super().reset(seed)
            self.number, self.turns = random.randint(1, 9), 0
            return f"from {seed}", {"suffix": "go"}

        def step(self, action):
            self.turns += 1
            won = action == str(self.number)
            return f"not {action}", 1.0 if won else -0.75, won, self.turns == 3, {"suffix": "go"}

    gem.register("game:Higher", Higher)

    class AgentExecutor(GemAgentExecutor):
        pass
"""


def test_game_matches_hand_computed_tokens_and_rewards(build, write):
    game = prompt("game:Higher", label="2")
    won, lost = Scripted("3</s>", "1</s>"), Scripted("9</s>")
    executor = build(agent_func_path=write(HIGHER), step_rewards=True)
    first, second = run(executor, [won, lost], asked=game).trajectories
    assert decode(first.input_ids) == "<u>from 2<a>3</s><u>not 3\ngo<a>1</s>"
    assert decode(second.input_ids) == "<u>from 2<a>9</s><u>not 9\ngo<a>9</s><u>not 9\ngo<a>9</s>"
    assert (first.reward, first.extra_logs, first.truncated) == (0.25, {"turn_count": 2.0}, False)
    assert (second.reward, second.extra_logs, second.truncated) == (-1.0, {"turn_count": 3.0}, False)
    assert first.step_rewards == ((12 + 1, -0.75), (len(first.input_ids) - 1, 1.0))
    acted = [token for token, mask in zip(first.input_ids, first.action_mask, strict=True) if mask]
    assert acted == encode("3</s>1</s>")


@pytest.mark.parametrize(
    ("name", "label", "message"),
    [
        ("game:Lower", "2", "got 'game:Lower' (Environment game:Lower not found"),
        ("game:GuessTheNumber-v0", "2", "Try: game:GuessTheNumber-v0-"),  # as upstream's example calls it
        ("game:Higher", "", "the label of a prompt for GEM is '' (str): expected a whole number"),
    ],
)
def test_unknown_game_or_seed_is_reported(build, write, name, label, message):
    executor = build(agent_func_path=write(HIGHER), on_reward_error="skip")
    (failure,) = run(executor, [Scripted("a")], asked=prompt(name, label=label)).failures
    assert message in str(failure)


def test_missing_package_is_reported_with_the_pip_command(build, write):
    """A None in sys.modules makes the import fail."""
    missing = "import sys\nsys.modules['gem'] = None\n"
    with pytest.raises(ConfigError, match="Try: pip install gem-llm"):
        build(agent_func_path=write(missing + EXAMPLE.read_text()))


class Guesses(Scripted):
    """Scripted session with a vocabulary that has the backslash of a boxed number."""

    def __init__(self, tokenizer, *texts):
        super().__init__(*texts)
        self.tokenizer = tokenizer

    async def generate(self, request):
        self.requests.append(request)
        ids = tuple(self.tokenizer(self.texts[len(self.requests) - 1], add_special_tokens=False)["input_ids"])
        return Completion.of(ids, (-1.0,) * len(ids), self.tokenizer.decode(ids), "stop", 0)


@pytest.fixture
def tokenizer():
    made = make_tokenizer()
    made.add_tokens(["\\"])
    return made


def test_guess_the_number_with_the_real_package(build, tokenizer):
    halving = Guesses(tokenizer, *(f"\\boxed{{{guess}}}</s>" for guess in (8, 2, 4, 3)))
    silent = Guesses(tokenizer, "no idea</s>")
    game = prompt("game:GuessTheNumber-v0-easy", label=3)
    executor = build(agent_func_path=str(EXAMPLE), context_length=2000)
    played, failed = run(executor, [halving, silent], asked=game, max_tokens=100).trajectories
    first, second = (session.requests[0].prompt_token_ids for session in (halving, silent))
    assert first == second
    assert "between 1 and 10" in tokenizer.decode(list(first))
    assert 0.0 <= played.reward <= 1.0
    assert played.extra_logs["turn_count"] == len(halving.requests)
    assert "At turn 1, you guessed 8" in tokenizer.decode(list(played.input_ids))
    assert failed.reward == pytest.approx(-0.1)
    assert not played.truncated
