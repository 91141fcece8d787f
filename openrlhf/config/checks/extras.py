"""Rules about optional packages: if a flag needs a missing package, the error contains the pip command."""

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
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


def install_command(extra: str | None = None, root: Path = ROOT, package: str | None = None) -> str:
    """Return the pip command that installs an extra, or this package's own requirements; it works in any folder.

    A checkout stays linked (`-e`). Elsewhere the requirements themselves are named, because openrlhf on PyPI is another
    project; a copy of the package without metadata names only the missing `package`.
    """
    if (root / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{root}[{extra}]' if extra else str(root))}"
    declared: list[str] = []
    with suppress(PackageNotFoundError):
        declared = requires("openrlhf") or []
    names = list(dict.fromkeys(requirements_of(extra, declared)))
    return f"python -m pip install {shlex.join(names or [package or extra or 'torch'])}"


def requirements_of(extra: str | None, declared: Sequence[str]) -> Iterator[str]:
    """Yield the requirements of an extra (None: the base requirements), and of the openrlhf extras that it includes."""
    wanted = extra.replace("_", "-") if extra else None  # as metadata spells it
    for line in declared:
        requirement, _, marker = line.partition(";")
        found = re.search(r"""extra == ["']([^"']+)["']""", marker)
        if (found[1].replace("_", "-") if found else None) != wanted:
            continue
        own = re.fullmatch(r"openrlhf\[(.+)\]", requirement.strip())
        if own is None:
            yield requirement.strip()
        for included in own[1].split(",") if own else ():
            yield from requirements_of(included.strip(), declared)


def require(package: str, needed_by: str, extra: str | None = None) -> None:
    """Raise an error with the pip command if a package is not installed, without importing it."""
    if find_spec(package) is None:
        extra = extra or EXTRA_OF.get(package, package)
        command = install_command(extra, package=package)
        raise MissingExtraError(f"{needed_by} needs {package}, which is not installed", try_this=command)


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
