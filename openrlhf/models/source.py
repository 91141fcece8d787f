"""Find a model that a flag names: a local folder, or a name on a hub, which may have a revision.

`load` passes the result of `find_source` to `from_pretrained`, and turns its failures into errors with `cannot_load`.
"""

from pathlib import Path
from typing import NotRequired, TypedDict

from openrlhf.config.checks.paths import looks_local, nearest_path, split_revision
from openrlhf.config.sections.model import LoadingFlags
from openrlhf.data.hub import hub_failure, model_is_cached
from openrlhf.errors import ConfigError, first_line


class ModelSource(TypedDict):
    """Arguments of `from_pretrained` that locate a model."""

    pretrained_model_name_or_path: str
    trust_remote_code: bool
    revision: NotRequired[str]
    local_files_only: NotRequired[bool]


def find_source(name: str, loading: LoadingFlags) -> ModelSource:
    """Return where to load a model from. With --use_ms, ModelScope downloads it to a local folder first."""
    where, revision = split_revision(name)
    source: ModelSource = {"pretrained_model_name_or_path": where, "trust_remote_code": loading.trust_remote_code}
    if looks_local(where):
        source["pretrained_model_name_or_path"] = str(Path(where).expanduser())
        return source
    if loading.use_ms and not Path(where).is_dir():
        from modelscope import snapshot_download  # pyrefly: ignore[missing-import]

        pinned: dict[str, str] = {} if revision is None else {"revision": revision}
        source["pretrained_model_name_or_path"] = snapshot_download(where, **pinned)
        return source
    if not Path(where).exists() and (failure := hub_failure()):
        if not model_is_cached(where, revision):
            fix = nearest_path(where) or "a folder on this machine, or HF_ENDPOINT with the address of a mirror"
            raise ConfigError(f"{where} is neither a local folder nor in the cache, and {failure}", try_this=fix)
        source["local_files_only"] = True  # otherwise the client retries for most of a minute before it uses the cache
    if revision is not None:
        source["revision"] = revision
    return source


def cannot_load(what: str, name: str, error: Exception) -> ConfigError:
    """Return the error for a model or tokenizer that Transformers could not load."""
    if isinstance(error, ConfigError):  # raised by `find_source`, with a complete message
        return error
    nor_here = "" if Path(name).exists() else f" There is no local folder {name} either."
    return ConfigError(f"cannot load the {what} {name}: {first_line(error)}{nor_here}")
