"""Hooks of mkdocs: put the Markdown files at the root of the repository on the site, next to the pages of docs/.

Links are written so that they work on GitHub: `../SECURITY.md` from a page of docs/, `docs/models.md` from a root file.
On the site all of them are in one folder, so both prefixes are removed.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = ("SECURITY.md", "CONTRIBUTING.md")
TO_ROOT_PAGE = re.compile(rf"\]\(\.\./({'|'.join(map(re.escape, ROOT_PAGES))})")
TO_DOCS = re.compile(r"\]\(docs/")


def on_files(files: Files, config: Any, **_: object) -> Files:
    """Add the root files as pages."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Rewrite links between docs/ and the root for the site."""
    if page.file.src_uri in ROOT_PAGES:
        return TO_DOCS.sub("](", markdown)
    return TO_ROOT_PAGE.sub(r"](\1", markdown)
