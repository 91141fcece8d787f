"""Agents that exchange chat messages with the policy: through an OpenAI-compatible server, with GEM, or with NeMo Gym.

All of them extend `episode.ChatExecutor`, whose `ChatEpisode` turns messages into one append-only sequence of tokens.
"""
