"""Agents that talk to the policy in messages: through an OpenAI-compatible server, with GEM, or with NeMo Gym.

All of them extend `episode.ChatExecutor`, whose `ChatEpisode` turns messages into one append-only sequence of tokens.
"""
