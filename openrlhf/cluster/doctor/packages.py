"""Python and the packages: their versions, whether they are recent enough, and what each is needed for."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING

from openrlhf.cluster.doctor.findings import Diagnosis
from openrlhf.config.checks.extras import install_command

if TYPE_CHECKING:
    from packaging.requirements import Requirement

AREA = "Packages"
OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Package:
    """A package on PyPI; `extra` is our extra that installs it, or None if every run needs the package."""

    name: str
    use: str
    extra: str | None = None
    ours: bool = True  # False: none of our extras installs it


PACKAGES = (
    Package("torch", "everything"),
    Package("transformers", "models and tokenizers"),
    Package("datasets", "data"),
    Package("peft", "LoRA"),
    Package("accelerate", "loading large models"),
    Package("deepspeed", "training on several devices", "deepspeed"),
    Package("ray", "several devices or machines in RL", "ray"),
    Package("vllm", "fast generation, with --vllm_num_engines", "vllm"),
    Package("bitsandbytes", "4-bit base models, with --load_in_4bit", "qlora"),
    Package("liger-kernel", "fused kernels, with --use_liger_kernel", "liger"),
    Package("wandb", "Weights & Biases, with --use_wandb", "wandb"),
    Package("trackio", "Trackio, with --use_trackio", "trackio"),
    Package("fastapi", "the run viewer (extra view) and serve_rm (extra serve)", "view"),
    Package("gguf", "files for Ollama and llama.cpp, with export --gguf", "export"),
    Package("flash-attn", "optional; PyTorch has its own varlen kernel", "", ours=False),
    Package("flash-linear-attention", "faster linear-attention models, such as Qwen3-Next", "", ours=False),
    Package("mamba-ssm", "faster state-space models", "", ours=False),
)


def package_findings() -> Iterator[Diagnosis]:
    """Yield one finding for Python and one for each package."""
    old = sys.version_info < OLDEST_PYTHON
    wanted = ".".join(map(str, OLDEST_PYTHON))
    fix = f"Python {wanted} or newer: PYTHON=python{wanted} make quickstart" if old else ""
    yield Diagnosis(AREA, "python", platform.python_version(), "broken" if old else "ok", fix)
    for package in PACKAGES:
        yield inspect_package(package)


def inspect_package(package: Package) -> Diagnosis:
    """Compare the installed version of a package with the version that openrlhf requires."""
    installed = installed_version(package.name)
    if installed is None:
        if package.extra is None:
            return Diagnosis(
                AREA, package.name, f"missing ({package.use})", "broken", install_command(package=package.name)
            )
        install = (
            install_command(package.extra, package=package.name) if package.ours else f"pip install {package.name}"
        )
        return Diagnosis(AREA, package.name, f"not installed ({package.use}): {install}", "note")
    requirement = requirement_of(package.name)
    if requirement is not None and not requirement.specifier.contains(installed, prereleases=True):
        status = "broken" if package.extra is None else "warning"
        value = f"{installed}, but expected {requirement.specifier} ({package.use})"
        return Diagnosis(AREA, package.name, value, status, f"pip install '{package.name}{requirement.specifier}'")
    return Diagnosis(AREA, package.name, f"{installed} ({package.use})")


def installed_version(name: str) -> str | None:
    """Return the version of a package, or None; builds of vLLM for other devices have other names on PyPI."""
    for distribution in (name, f"{name}-cpu", f"{name}-rocm"):
        with suppress(PackageNotFoundError):
            return version(distribution)
    return None


def requirement_of(name: str) -> Requirement | None:
    """Return the versions that our own metadata allows; None if it allows any, or if openrlhf is not installed."""
    try:
        from packaging.requirements import Requirement

        found = [Requirement(line) for line in requires("openrlhf") or ()]
    except (ImportError, PackageNotFoundError):
        return None
    return next((item for item in found if item.name == name and item.specifier), None)
