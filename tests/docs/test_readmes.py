"""The front page has the same content in all languages: the same structure, commands, figures and links."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def outline(text):
    """Return what a translation must share: levels of headings, commands without comments, links, figures, table sizes.

    Small numbers may be words in one language and digits in another.
    """
    prose = FENCED.sub("", text)
    links = sorted(re.findall(r"\]\(([^)]+)\)", prose))
    return {
        "headings": [len(marks) for marks in re.findall(r"^(#+) ", prose, re.MULTILINE)],
        "code": [re.sub(r" +#.*", "", block) for block in FENCED.findall(text)],
        "links": [link for link in links if not link.startswith("README")],
        "figures": sorted(re.findall(r"\d[\d,.]*\d", re.sub(r"\]\([^)]+\)|`[^`]*`", "", prose))),
        "names": sorted({" ".join(name.split()) for name in re.findall(r"`([^`]+)`", prose)}),
        "rows": len(re.findall(r"^\|", prose, re.MULTILINE)),
    }


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_a_translation_says_the_same(language):
    text = (ROOT / f"README.{language}.md").read_text(encoding="utf-8")
    translated, english = outline(text), outline(ENGLISH)
    for part in english:
        assert translated[part] == english[part], part


def test_every_translation_is_linked():
    assert {"README.zh.md", "README.ja.md"} <= set(re.findall(r"\]\(([^)]+)\)", ENGLISH))
