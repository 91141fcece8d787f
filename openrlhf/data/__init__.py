"""From datasets to batches of tokens.

    files, sources         a flag's datasets, opened and mixed          -> Records
    json_text              JSON from outside, checked; also used for models, servers and clients
    messages, templates    one row's prompt and response as text        -> Marked: text and learned spans
    tokens                 text as token ids with a mask                -> TokenRow
    sft, preference,       all rows of a command; wrong rows raise,     -> rows of one kind
    process, prompts       unusable ones are dropped and counted
    collate                rows of one micro-batch, padded or packed    -> Batch

`supervised` chooses the rows of a supervised command, `prompts` makes those of RL, and `answers` those of batch
inference. All rows are tokenised before training starts, so that bad data fails in the first minutes of a run.
"""
