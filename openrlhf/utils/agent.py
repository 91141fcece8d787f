"""Public agent classes, re-exported under the path that agent files import."""

from openrlhf.agents.chat.gem import GemAgentExecutor
from openrlhf.agents.chat.nemo_gym import NemoGymAgentExecutor
from openrlhf.agents.chat.openai_agent import OpenAIAgentExecutor
from openrlhf.agents.chat.openenv import OpenEnvAgentExecutor
from openrlhf.agents.interface import AgentExecutorBase, AgentInstanceBase
from openrlhf.agents.multi_turn import MultiTurnAgentExecutor
from openrlhf.agents.single_turn_agent import SingleTurnAgentExecutor

__all__ = [
    "AgentExecutorBase",
    "AgentInstanceBase",
    "GemAgentExecutor",
    "MultiTurnAgentExecutor",
    "NemoGymAgentExecutor",
    "OpenAIAgentExecutor",
    "OpenEnvAgentExecutor",
    "SingleTurnAgentExecutor",
]
