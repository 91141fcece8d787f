"""Rules about optional packages: if a flag needs one that is missing, the error contains the pip command."""

from importlib.util import find_spec

from openrlhf.config.commands import BatchInferenceConfig, RLConfig, ServeRMConfig
from openrlhf.config.flags import flag_values
from openrlhf.config.runtime import resolve_runtime
from openrlhf.errors import MissingExtraError

PACKAGE_OF = {"load_in_4bit": "bitsandbytes", "use_liger_kernel": "liger_kernel", "use_wandb": "wandb"}  # by flag
EXTRA_OF = {"liger_kernel": "liger", "bitsandbytes": "qlora"}  # by package; the other extras have its name
EXTRA_OF |= dict.fromkeys(("fastapi", "uvicorn", "aiohttp"), "serve")


def require(package: str, needed_by: str) -> None:
    """Raise, with the pip command, if a package is not installed; imports nothing."""
    if find_spec(package) is None:
        extra = EXTRA_OF.get(package, package)
        raise MissingExtraError(
            f"{needed_by} needs {package}, which is not installed", try_this=f"pip install '.[{extra}]'"
        )


def requested_extras_are_installed(config: object) -> None:
    """Check packages that a flag of any command requires."""
    values = flag_values(config)
    for name, package in PACKAGE_OF.items():
        if values.get(name):
            require(package, f"--{name}")


def cluster_extras_are_installed(config: RLConfig) -> None:
    """Check Ray and vLLM before a cluster starts."""
    if resolve_runtime(config) == "ray":
        require("ray", "--runtime ray (several nodes, devices or engines require it)")
    if config.engines.vllm_num_engines:
        require("vllm", "--vllm_num_engines")


def batch_engine_is_installed(config: BatchInferenceConfig) -> None:
    """Check vLLM and Ray for batch inference, which has its own flags for them."""
    if config.task.eval_task == "generate_vllm":
        require("vllm", "--eval_task generate_vllm")
    if config.task.vllm_num_engines is not None:
        require("ray", "--vllm_num_engines")


def the_server_is_installed(config: ServeRMConfig) -> None:
    """The web framework is an extra that only this command needs."""
    for package in ("fastapi", "uvicorn"):
        require(package, "serve_rm")
