"""Agents that talk to the policy through an OpenAI-compatible server, GEM or NeMo Gym."""
