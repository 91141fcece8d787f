"""Answers to the prompts of a Python caller: batch_inference without an output file.

`openrlhf.generate` has no output file: rows are written to a temporary folder and returned as a list.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from openrlhf.config.commands import BatchInferenceConfig
from openrlhf.config.flags import replace_flags
from openrlhf.inference.batch_inference import produce


def run(config: BatchInferenceConfig) -> list[str]:
    """Return the answers in order; empty in all processes of a launcher but the first."""
    with tempfile.TemporaryDirectory(prefix="openrlhf-answers-") as folder:
        result = produce(replace_flags(config, output_path=str(Path(folder) / "answers.jsonl")))
        if result is None:
            return []
        with result.output_path.open(encoding="utf-8") as file:  # splitlines would also split at U+2028 inside a row
            return [json.loads(line)["output"] for line in file]
