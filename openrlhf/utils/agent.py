"""Public agent classes, re-exported under the path that agent files import."""

from openrlhf.agents.chat.gem import GemAgentExecutor as GemAgentExecutor
from openrlhf.agents.chat.nemo_gym import NemoGymAgentExecutor as NemoGymAgentExecutor
from openrlhf.agents.chat.openai_agent import OpenAIAgentExecutor as OpenAIAgentExecutor
from openrlhf.agents.chat.openenv import OpenEnvAgentExecutor as OpenEnvAgentExecutor
from openrlhf.agents.interface import AgentExecutorBase as AgentExecutorBase
from openrlhf.agents.interface import AgentInstanceBase as AgentInstanceBase
from openrlhf.agents.multi_turn import MultiTurnAgentExecutor as MultiTurnAgentExecutor
from openrlhf.agents.single_turn_agent import SingleTurnAgentExecutor as SingleTurnAgentExecutor
