"""Record of how a run was started: flags, package versions and git revision."""

import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from openrlhf.config.flags import flag_values

PACKAGES = ("openrlhf", "torch", "transformers", "peft", "datasets", "deepspeed", "ray", "vllm")
SECRET = ("use_wandb", "api_key", "reward_api_key")  # flags that hold API keys, which must not be written to files


def shown_flags(config: object) -> dict[str, Any]:
    """Return all flags for files and dashboards, with API keys hidden.

    The values have gone through JSON, so that they compare equal to saved ones.
    """
    values = flag_values(config)
    return json.loads(
        json.dumps({name: "***" if name in SECRET and value else value for name, value in values.items()})
    )


def write_run_config(run_dir: Path, flags: Mapping[str, object]) -> None:
    """Write `run_dir/config.json`: all resolved flags, package versions and, in a checkout, the git revision."""
    content = {
        "flags": flags,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "revision": _revision(),
    }
    (run_dir / "config.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _revision() -> str | None:
    """Return the git revision of the running code, or None outside a checkout."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
