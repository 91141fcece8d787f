"""Rules about optional packages: if a flag needs a missing package, the error contains the pip command."""

import shlex
from importlib.util import find_spec
from pathlib import Path

from openrlhf.config.commands import BatchInferenceConfig, RLConfig, ServeRMConfig, ViewConfig
from openrlhf.config.flags import flag_values
from openrlhf.config.runtime import resolve_runtime
from openrlhf.errors import MissingExtraError

ROOT = Path(__file__).parents[3]  # the folder that contains the package: a checkout, or site-packages
PACKAGE_OF = {  # by flag
    "load_in_4bit": "bitsandbytes",
    "use_liger_kernel": "liger_kernel",
    "use_wandb": "wandb",
    "use_trackio": "trackio",
    "gguf": "gguf",
}
# By package; other extras are named like their package.
EXTRA_OF = {"liger_kernel": "liger", "bitsandbytes": "qlora", "gguf": "export"}
EXTRA_OF |= dict.fromkeys(("fastapi", "uvicorn", "aiohttp"), "serve")


def install_command(extra: str | None = None, root: Path = ROOT) -> str:
    """Return the pip command that installs this package with an extra; it works in any folder.

    A checkout stays linked (`-e`). If the package is installed, pip only adds the packages of the extra.
    """
    brackets = f"[{extra}]" if extra else ""
    if (root / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{root}{brackets}')}"
    return f"pip install {shlex.quote(f'openrlhf{brackets}')}"


def require(package: str, needed_by: str, extra: str | None = None) -> None:
    """Raise an error with the pip command if a package is not installed, without importing it."""
    if find_spec(package) is None:
        extra = extra or EXTRA_OF.get(package, package)
        raise MissingExtraError(f"{needed_by} needs {package}, which is not installed", try_this=install_command(extra))


def needed_extras_are_installed(config: object) -> None:
    """Check the packages that flags, engines and the server need, before anything starts."""
    values = flag_values(config)
    for name, package in PACKAGE_OF.items():
        if values.get(name):
            require(package, f"--{name}")
    match config:
        case RLConfig(engines=engines):
            if resolve_runtime(config) == "ray":
                require("ray", "--runtime ray (several nodes, devices or engines require it)")
            if engines.vllm_num_engines:
                require("vllm", "--vllm_num_engines")
        case BatchInferenceConfig(task=task):
            if task.eval_task == "generate_vllm":
                require("vllm", "--eval_task generate_vllm")
            if task.vllm_num_engines is not None:
                require("ray", "--vllm_num_engines")
        case ServeRMConfig():
            for package in ("fastapi", "uvicorn"):
                require(package, "serve_rm")


def serving_the_page_needs_its_extra(config: ViewConfig) -> None:
    """Require the server's packages unless the page is written to a file."""
    if not config.page.export:
        for package in ("fastapi", "uvicorn"):
            require(package, "openrlhf view without --export", extra="view")
