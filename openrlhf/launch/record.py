"""What a run was started with: flags, versions, revision."""

import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from openrlhf.config.flags import flag_values

PACKAGES = ("openrlhf", "torch", "transformers", "peft", "datasets", "deepspeed", "ray", "vllm")
SECRET = ("use_wandb", "api_key", "reward_api_key")  # keys that must not lie about in files


def shown_flags(config: object) -> dict[str, Any]:
    """Every flag for files and dashboards: keys hidden, the rest as JSON gives it back, so that saved ones compare."""
    values = flag_values(config)
    return json.loads(
        json.dumps({name: "***" if name in SECRET and value else value for name, value in values.items()})
    )


def write_run_config(run_dir: Path, flags: Mapping[str, object]) -> None:
    """`run_dir/config.json`: every resolved flag, the versions of what runs it, the git revision where there is one."""
    content = {
        "flags": flags,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "revision": _revision(),
    }
    (run_dir / "config.json").write_text(json.dumps(content, indent=1))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The revision of the code that runs, if it runs from a checkout."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
