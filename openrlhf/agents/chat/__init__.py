"""Agents that exchange chat messages with the policy: an OpenAI-compatible server, GEM, OpenEnv and NeMo Gym.

All of them extend `episode.ChatExecutor`, whose `ChatEpisode` turns messages into one append-only sequence of tokens.
"""
