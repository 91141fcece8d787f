"""The doctor's report: findings about this machine, fixes, exit codes; also on a machine without torch."""

import json
import os
import socket
import subprocess
import sys

import pytest

from openrlhf.cli.main import main
from openrlhf.cluster.doctor.findings import Diagnosis
from openrlhf.cluster.doctor.host import host_findings, port_findings
from openrlhf.cluster.doctor.packages import PACKAGES, Package, inspect_package, requirement_of
from openrlhf.cluster.doctor.report import examine, render
from openrlhf.cluster.doctor.services import hub_findings
from openrlhf.config.checks.extras import install_command
from tests.commands import ROOT

WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "datasets", "huggingface_hub", "ray", "packaging"):
    sys.modules[name] = None  # an import raises ImportError
from openrlhf.cli.main import main
main(["doctor", "--json"])
"""


def by_subject(findings):
    return {one.subject: one for one in findings}


@pytest.fixture(autouse=True)
def no_hub_settings(monkeypatch):
    for name in ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)


def test_a_machine_that_runs_these_tests_has_nothing_broken(capsys):
    main(["doctor"])
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("  broken")] == []
    for heading in ("Packages", "Devices", "Host", "Services"):
        assert f"\n{heading}\n" in f"\n{printed}"


def test_every_problem_has_a_fix_and_nothing_else_has_one():
    found = examine(online=False)
    assert all(bool(one.fix) == (one.status in ("warning", "broken")) for one in found)
    assert {"python", "torch", "memory", "current folder", "open files", "sandbox", "hub"} <= by_subject(found).keys()


def test_the_report_lists_the_fixes_at_its_end():
    fine, slow = Diagnosis("Host", "cores", "2"), Diagnosis("Host", "memory", "1 GiB", "warning", "more memory")
    assert render([fine]).splitlines()[-1] == "Nothing to fix."
    assert render([fine, slow]).splitlines() == [
        "Host",
        "  ok       cores   2",
        "  warning  memory  1 GiB",
        "",
        "1 thing to fix",
        "  1. memory (warning): more memory",
    ]


def test_without_torch_the_rest_is_examined_and_the_exit_code_is_1():
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], env=environ, capture_output=True, text=True, check=False
    )
    found = {one["subject"]: one for one in json.loads(done.stdout)}
    assert done.returncode == 1, done.stderr
    assert found["PyTorch"]["status"] == "broken"
    assert found["cores"]["status"] == "ok"
    assert done.stderr == ("openrlhf: error: no run works on this machine yet: PyTorch. Try: the fixes above\n")


def test_packages_are_compared_with_our_requirements():
    assert {package.name for package in PACKAGES if package.extra is None} <= {
        finding.subject for finding in examine(online=False) if finding.status == "ok"
    }
    needed = inspect_package(Package("no-such-package", "everything"))
    assert (needed.status, needed.fix) == ("broken", install_command())
    optional = inspect_package(Package("no-such-package", "speed", "liger"))
    missing = f"not installed (speed): {install_command('liger')}"
    assert optional == Diagnosis("Packages", "no-such-package", missing, "note")
    (server,) = (package for package in PACKAGES if package.name == "fastapi")
    assert server.extra == "view"  # serve would also install what only serve_rm needs
    torch = requirement_of("torch")
    assert torch is not None
    assert not torch.specifier.contains("1.0")


def test_a_folder_that_does_not_exist_yet_is_judged_by_its_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "new" / "home"))
    assert f"{tmp_path}/new/home/hub, " in by_subject(host_findings())["hub cache"].value


def test_a_port_in_use_is_reported(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("openrlhf.cluster.doctor.host.RAY_PORT", server.getsockname()[1])
        assert by_subject(port_findings())["Ray's port"].status == "note"
    assert by_subject(port_findings())["Ray's port"].status == "ok"


def test_the_hub_is_tried_only_on_request(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", address)  # nothing listens there any more
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (asked,) = hub_findings(online=True)
    assert (asked.status, "cannot be reached" in asked.value) == ("warning", True)
    (idle,) = hub_findings(online=False)
    assert (idle.status, idle.value) == ("ok", f"{address}, not tried (--online tries it)")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [one.status for one in hub_findings(online=True)] == ["note"]
