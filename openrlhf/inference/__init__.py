"""Commands on trained models: batch inference, chat, the reward server and merging adapters."""
