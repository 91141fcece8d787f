"""The commands of docs/cluster.md that protect a cluster's token."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"


def test_only_its_owner_can_read_the_token_at_any_time(tmp_path):
    """The file must not be created first and protected later."""
    (line,) = re.findall(r"^.*> ~/ray_token\)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    line = line.replace("python -c", f"'{sys.executable}' -c")
    subprocess.run(["bash", "-c", f"umask 022; {line}"], env={**os.environ, "HOME": str(tmp_path)}, check=True)
    token = tmp_path / "ray_token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64
