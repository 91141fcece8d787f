"""Try every causal-LM family of the installed Transformers on a tiny model, and write docs/models.md from the results.

The columns are the tests of tests/models/test_architectures.py. A family whose results are wrong, or that fails with an
error other than ours, fails its test, and the page stays as it is. Arguments are passed on to pytest.
"""

import re
import sys
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
COLUMNS = ("training", "LoRA", "reward model", "save and reload", "generation")
REFUSED = "refused: "

INTRODUCTION = """\
# Models

<!-- Written by `make matrix` (tools/model_matrix.py). Do not edit. -->

You can try any model that `AutoModelForCausalLM` of Transformers loads. Before a run uses a model, a self-test compares
our forward with the model's own on a few tokens, and the run uses the fastest layout in which the two agree:

- **packed**: sequences share one row without padding.
- **padded**: one row per sequence, padded and masked.
- **row by row**: one call per sequence; correct, but slow.
- **no**: no layout gives correct results, and the run stops with a message.

The table shows what happens with each family, on a tiny model with random weights in fp32 on a CPU. "Yes" means
correct to 1e-4, "no" means rejected with a message; the numbers refer to the reasons below.

- **layout**: log-probs of sequences alone and in a micro-batch.
- **training**: gradients of a micro-batch; every trained parameter gets one.
- **LoRA**: adapters on all linear layers learn and can be merged. If "no", choose other `--target_modules`.
- **reward model**: scores of a reward model or critic, saved and loaded.
- **save and reload**: the same log-probs from the saved folder.
- **generation**: log-probs of the in-process engine.
- **vLLM**: vLLM has the model class. vLLM may run other models through its Transformers backend.

On GPUs some kernels differ: with `mamba_ssm` and `causal_conv1d` or with `fla`, hybrid families may run packed.
"""


class Recorder:
    """Results that the tests recorded, by family."""

    def __init__(self) -> None:
        self.families: dict[str, dict[str, str]] = defaultdict(dict)
        self.worst: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = re.search(r"::test_(\w+)\[([^\]]+)\]", report.nodeid)
        if report.when != "call" or found is None:
            return
        for name, value in report.user_properties:
            if name == "error":
                self.worst[found[1]] = max(self.worst[found[1]], value)
            else:
                self.families[found[2]][name] = str(value)


def main() -> int:
    recorder = Recorder()
    tests = ROOT / "tests" / "models" / "test_architectures.py"
    quiet = ("--durations=0", "--durations-min=30", "-p", "no:warnings", "--dist", "loadgroup")
    status = pytest.main([str(tests), "-m", "matrix or not matrix", *quiet, *sys.argv[1:]], plugins=[recorder])
    print_summary(recorder)
    if status:
        print(f"{PAGE} is not changed: some families are wrong, or fail without one of our own messages")
        return int(status)
    report_changes(PAGE.read_text(encoding="utf-8") if PAGE.exists() else "", text := page(recorder.families))
    PAGE.write_text(text, encoding="utf-8")
    return 0


def layouts(families: dict[str, dict[str, str]]) -> Counter[str]:
    return Counter("refused" if row["layout"].startswith(REFUSED) else row["layout"] for row in families.values())


def print_summary(recorder: Recorder) -> None:
    print(f"{len(recorder.families)} families: {dict(layouts(recorder.families))}")
    for column, error in recorder.worst.items():
        print(f"  largest error, {column}: {error:.1e}")


def report_changes(before: str, after: str) -> None:
    for line in sorted(set(before.splitlines()) ^ set(after.splitlines())):
        print("-" if line in before else "+", line)


def page(families: dict[str, dict[str, str]]) -> str:
    from tests.models.architectures import UNBUILT  # pytest has put the repository on the path

    vllm_version, served = served_by_vllm()
    counts = layouts(families)
    lines = [
        INTRODUCTION,
        f"With Transformers {version('transformers')}: {len(families)} families, {counts['packed']} packed,"
        f" {counts['padded']} padded, {counts['row by row']} row by row, {counts['refused']} rejected, none wrong."
        f" vLLM {vllm_version} has {len(served & families.keys())} of them.\n",
        f"| family | layout | {' | '.join(COLUMNS)} | vLLM |",
        f"|---|---|{'---|' * (len(COLUMNS) + 1)}",
    ]
    notes = Notes()
    for family in sorted([*families, *UNBUILT]):
        cells = ["-"] * (len(COLUMNS) + 1)
        if family in families:
            row = families[family]
            cells = [notes.cell(family, row[name]) for name in ("layout", *COLUMNS)]
        else:
            cells[0] = f"not tried {notes.number(UNBUILT[family])}"
        lines.append(f"| `{family}` | {' | '.join(cells)} | {'yes' if family in served else 'no'} |")
    return "\n".join([*lines, "", "## Why not", "", *notes.lines(), ""])


class Notes:
    """Numbered reasons; each appears once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def cell(self, family: str, outcome: str) -> str:
        if not outcome.startswith(REFUSED):
            return outcome
        return f"no {self.number(generic(family, outcome.removeprefix(REFUSED)))}"

    def number(self, reason: str) -> str:
        return f"[{self.numbers.setdefault(reason, len(self.numbers) + 1)}]"

    def lines(self) -> list[str]:
        return [f"{number}. {reason[0].upper()}{reason[1:]}." for reason, number in self.numbers.items()]


DETAILS = (
    (r"(no sequence classifier) for the family \S+", r"\1 for its family"),
    (
        r"\b(?!Auto)\w+(ForCausalLM|ForSequenceClassification|ForConditionalGeneration|LMHeadModel|WithLMHead)\b",
        "the model",
    ),
    (r"<class '[^']*'> | \(model_type=[^)]*\)|\[PEFT:\S* |\. Incompatible modules.*", ""),
    (r"\d+ of \d+ trainable parameters \([^)]*\)", "some trainable parameters"),
    (r" by [\d.e+-]+ \([\d.e+-]+ allowed\)| \([\d.e+-]+, [\d.e+-]+ allowed\)", ""),
    (r"base_model\S+ and base_model\S+", "some layers"),
    (r"\s+", " "),
)
"""Patterns that differ between families and machines, and their replacement on the page."""


def generic(family: str, message: str) -> str:
    """Return the message in a form that families can share."""
    for pattern, replacement in (*DETAILS, (rf"\b{re.escape(family)}\b", "the model")):
        message = re.sub(pattern, replacement, message)
    return message.replace("the model the model", "the model").rstrip(".")


def served_by_vllm() -> tuple[str, set[str]]:
    """Return vLLM's version and the families that it implements."""
    import vllm

    known = set(vllm.ModelRegistry.get_supported_archs())
    found = {family for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in known}
    return vllm.__version__.partition("+")[0], found


if __name__ == "__main__":
    sys.exit(main())
