"""Public agent classes, re-exported under the path that agent files import."""

from openrlhf.agents.gem import GemAgentExecutor
from openrlhf.agents.interface import AgentExecutorBase, AgentInstanceBase
from openrlhf.agents.multi_turn import MultiTurnAgentExecutor
from openrlhf.agents.nemo_gym import NemoGymAgentExecutor
from openrlhf.agents.one_turn import SingleTurnAgentExecutor
from openrlhf.agents.openai_agent import OpenAIAgentExecutor

__all__ = [
    "AgentExecutorBase",
    "AgentInstanceBase",
    "GemAgentExecutor",
    "MultiTurnAgentExecutor",
    "NemoGymAgentExecutor",
    "OpenAIAgentExecutor",
    "SingleTurnAgentExecutor",
]
