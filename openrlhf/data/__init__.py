"""From datasets to batches of tokens.

    files, sources         a flag's datasets, opened and mixed          -> Records
    json_text              untrusted JSON, checked; also used for models, servers and clients
    messages, templates    one row's prompt and response as text        -> Marked: text and learned spans
    tokens                 text as token ids with a mask                -> TokenRow
    sft, preference,       all rows of a command; invalid rows raise,   -> rows of one kind
    process, prompts       unusable ones are dropped and counted
    report, findings       dropped and cut rows, likely mistakes        -> DataReport, with the rows
    preview, preview_text  rows as the model sees them                  -> Preview, and its text
    collate                rows of one micro-batch, padded or packed    -> Batch

`supervised` builds the rows of the supervised commands, `prompts` those of RL, and `answers` those of batch inference.
All rows are tokenised before training starts, so that bad data is reported in the first minutes of a run.
"""
