"""The view command: serve the run viewer until Ctrl-C, or write its page to a file."""

from __future__ import annotations

import tempfile
import webbrowser
from contextlib import suppress
from pathlib import Path

from openrlhf.config.commands import ViewConfig
from openrlhf.errors import counted
from openrlhf.monitor import say
from openrlhf.view.report import write_report
from openrlhf.view.runs import find_runs
from openrlhf.view.viewer import Viewer


def run(config: ViewConfig) -> None:
    flags = config.page
    if flags.export:
        runs = find_runs(config.runs.run_dirs)
        write_report(Path(flags.export).expanduser(), runs)
        say(f"wrote {flags.export}: {counted(len(runs), 'run')}, in one file that any browser opens")
        return
    from openrlhf.view.server import HOST, Server, bind  # FastAPI, which only serving needs

    with tempfile.TemporaryDirectory(prefix="openrlhf-view-") as workspace:
        viewer = Viewer(config.runs.run_dirs, Path(workspace))
        with bind(flags.port) as listener:
            address = f"http://{HOST}:{listener.getsockname()[1]}"
            say(f"{counted(len(viewer.found), 'run')} on {address} (Ctrl-C ends the server)")
            if flags.open:
                webbrowser.open(address)
            with suppress(KeyboardInterrupt):  # the usual way to stop
                Server(viewer).run([listener])
