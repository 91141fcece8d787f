"""Find out quickly whether the Hugging Face Hub can be reached; its own client retries for most of a minute.

`models.load` and `data.sources` call `hub_failure` for names that are not local. A name that is in the cache is then
loaded from there, and any other name is an error, often a mistyped folder. The hub's client is imported late, because
`openrlhf doctor` calls `connection_failure` on machines where nothing may be installed yet.
"""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

SECONDS = 5.0
PORTS = {"https": 443, "http": 80}
FILES_OF_A_MODEL = ("config.json", "tokenizer_config.json")


def hub_failure() -> str | None:
    """Return why the hub cannot be reached; None if it can be, or if HF_HUB_OFFLINE says not to try."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    reason = connection_failure(constants.ENDPOINT)
    return None if reason is None else f"{constants.ENDPOINT} cannot be reached: {reason}"


def connection_failure(address: str) -> str | None:
    """Return why no connection to a URL, or to the proxy for it, can be opened; None if one can. Nothing is sent."""
    url, proxies = urlsplit(address), getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    try:
        with socket.create_connection((url.hostname or "", url.port or PORTS.get(url.scheme, 443)), timeout=SECONDS):
            return None
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a port or a host name that cannot exist
        return str(error)


def model_is_cached(repository: str, revision: str | None) -> bool:
    """Return whether the config or tokenizer of a model is in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    found = (try_to_load_from_cache(repository, file, revision=revision) for file in FILES_OF_A_MODEL)
    return any(isinstance(path, str) for path in found)


def dataset_is_cached(name: str) -> bool:
    """Return whether a dataset is in the cache of `datasets` or in that of the hub."""
    import datasets
    from datasets.naming import camelcase_to_snakecase
    from huggingface_hub import constants

    *owner, last = name.split("/")
    prepared = Path(datasets.config.HF_DATASETS_CACHE) / "___".join([*owner, camelcase_to_snakecase(last)])
    downloaded = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    return prepared.exists() or downloaded.exists()
