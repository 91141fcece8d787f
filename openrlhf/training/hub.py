"""Upload of a finished model to the Hugging Face Hub (--push_to_hub).

`check_login` runs before anything expensive and asks the hub for the owner of the token; the rules in
`config/checks/export.py` have already checked the name of the repository. `push_folder` runs after the model has been
saved, so a failed upload loses nothing: the error contains the command that repeats it.

The token comes from HF_TOKEN or from `hf auth login`. It is not a flag, so no record of a run can contain it.
"""

from __future__ import annotations

import glob
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, get_session, hf_raise_for_status

from openrlhf.config.sections.export import HubFlags
from openrlhf.errors import ConfigError, HubError, first_line
from openrlhf.monitor import is_main_process, say
from openrlhf.training.card_file import EDITED_CARD

MODEL_SUBFOLDERS = ("additional_chat_templates",)  # written by tokenizers; other folders belong to runs and checkpoints
TIMEOUT = 15.0  # seconds for the hub's first answer
PRIVATE_INSTEAD = "another --push_to_hub, or make the repository private in its settings on the hub"
REJECTED = (401, 403)  # answers to a token that is not valid, or may not write


def check_login(flags: HubFlags) -> None:
    """Ask the hub whether it knows the token, and whether the repository is public although --hub_private is set.

    A hub that cannot be reached now may be reachable after training.
    """
    if flags.push_to_hub is None or not is_main_process():
        return
    public = False
    try:
        user = ask_hub()
        name = flags.push_to_hub if "/" in flags.push_to_hub else f"{user}/{flags.push_to_hub}"
        public = flags.hub_private and is_public(name)
    except HfHubHTTPError as error:
        if error.response.status_code in REJECTED:
            raise ConfigError(
                f"--push_to_hub {flags.push_to_hub}: the hub does not accept this machine's token",
                try_this="hf auth login, or another HF_TOKEN in the environment",
            ) from None
        say(f"--push_to_hub: the hub does not answer as expected ({reason_for(error)}); the run continues")
    except (HTTPError, OSError, ValueError) as error:
        say(f"--push_to_hub: the hub cannot be reached now ({reason_for(error)}); the model will be saved locally")
    if public:
        raise ConfigError(f"--hub_private: {flags.push_to_hub} exists and is public", try_this=PRIVATE_INSTEAD)


def ask_hub() -> str:
    """Return the user that the token belongs to; raise if the hub does not answer in time or does not know the token.

    The client's own requests have no time limit: behind a firewall that drops packets, they would wait forever.
    """
    url = f"{constants.ENDPOINT}/api/whoami-v2"
    answer = get_session().get(url, headers=build_hf_headers(), timeout=TIMEOUT)
    hf_raise_for_status(answer)
    return str(answer.json().get("name"))


def is_public(repository: str) -> bool:
    """Return whether a repository exists and everyone can read it."""
    try:
        return HfApi().model_info(repository, timeout=TIMEOUT).private is False
    except RepositoryNotFoundError:
        return False


def push_folder(folder: Path, flags: HubFlags) -> None:
    """Upload the model in a folder, without the records and checkpoints of its run; does nothing without the flag."""
    if flags.push_to_hub is None or not is_main_process():
        return
    disable_progress_bars()
    files = model_files(folder)
    with explained_failures(folder, flags):
        ask_hub()
        api = HfApi()
        repository = api.create_repo(flags.push_to_hub, private=flags.hub_private or None, exist_ok=True)
        public = flags.hub_private and is_public(repository.repo_id)  # one that existed keeps its visibility
    if public:
        raise HubError(
            f"--hub_private: {repository.repo_id} exists and is public, so nothing was uploaded. The model is complete"
            f" in {folder}",
            try_this=PRIVATE_INSTEAD,
        )
    with explained_failures(folder, flags):
        api.upload_folder(
            repo_id=repository.repo_id,
            folder_path=folder,
            allow_patterns=list(map(glob.escape, files)),
            commit_message="Upload model with OpenRLHF",
        )
    say(f"uploaded {folder} to {repository}")


def model_files(folder: Path) -> list[str]:
    """Return the files of a model folder, relative to it.

    By default, --save_path also contains the folders of checkpoints and of the run, with rollouts and metrics. Raise
    HubError for a link to a file elsewhere.
    """
    files = [path for path in folder.iterdir() if path.is_file()]
    files += [path for name in MODEL_SUBFOLDERS for path in (folder / name).glob("*")]
    kept = [path for path in files if not path.name.startswith(".") and path.name != EDITED_CARD]
    inside = (folder.resolve(), folder.resolve().parent.parent / "blobs")  # the hub's cache stores files in `blobs`
    for path in kept:
        if not any(path.resolve().is_relative_to(place) for place in inside):
            raise HubError(
                f"{path} leads out of the folder, to {path.resolve()}, so nothing was uploaded",
                try_this="a copy of the file in its place, if everyone who can read the repository may have it",
            )
    return sorted(str(path.relative_to(folder)) for path in kept)


@contextmanager
def explained_failures(folder: Path, flags: HubFlags) -> Iterator[None]:
    """Turn a failed upload into one line with the model's folder and the command to upload it later."""
    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError) as error:  # RuntimeError: large files, hf_xet
        words = ["HF_HUB_DISABLE_XET=1"] if "xet" in str(error).lower() else []  # some mirrors cannot receive that way
        words += ["openrlhf", "export", "--pretrain", str(folder), "--push_to_hub", flags.push_to_hub or ""]
        words += ["--hub_private"] if flags.hub_private else []
        raise HubError(
            f"the upload to {flags.push_to_hub} failed: {reason_for(error)}. The model is complete in {folder}",
            try_this=shlex.join(words),
        ) from None


def reason_for(error: Exception) -> str:
    """Return the reason for a failure in one line: the hub's message or, without an answer, the error itself."""
    if isinstance(error, HfHubHTTPError) and error.server_message:
        return f"{error.response.status_code} {' '.join(error.server_message.split())}"
    line = first_line(error).strip().rstrip(".")
    # The RuntimeError of a large file names only the file.
    cause = error.__cause__ if isinstance(error, RuntimeError) else None
    return f"{line}: {reason_for(cause)}" if isinstance(cause, Exception) else line
