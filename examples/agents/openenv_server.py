"""An environment server of OpenEnv (pip install openenv): guess a number from 1 to 9 in three turns.

    python examples/agents/openenv_server.py --port 8000

`openenv_game.py`, next to this file, trains a policy on it. The server may run on another machine or in a container.
"""

import argparse
import random
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field

TURNS = 3
SESSIONS = 1024  # concurrent episodes


class Guess(Action):
    """A turn of the policy."""

    text: str = Field(max_length=40)


class Hint(Observation):
    """What the policy reads next."""

    text: str


class GuessingGame(Environment[Guess, Hint, State]):
    """A number that is the same for the same seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self.number, self.turns = random.Random(seed).randint(1, 9), 0
        return Hint(text="Guess a number from 1 to 9.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self.turns += 1
        guess = action.text.strip()
        if guess == str(self.number):
            return Hint(text="Right.", reward=1.0, done=True)
        hint = "That is no number." if not guess.isdecimal() else "Higher." if int(guess) < self.number else "Lower."
        return Hint(text=hint, reward=-0.1, done=self.turns == TURNS)

    @property
    def state(self) -> State:
        return State(step_count=self.turns)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    app = create_fastapi_app(GuessingGame, Guess, Hint, max_concurrent_envs=SESSIONS)
    uvicorn.run(app, host=args.host, port=args.port)
