"""Print the size, the documentation share and the repetition of the package, as a table with one row per folder.

    python tools/code_metrics.py [FOLDER]     FOLDER defaults to openrlhf

Lines of code are lines without blanks, comments and docstrings. A duplicate is a pair of files that share at
least eight consecutive lines of code, once names, strings and numbers are replaced by placeholders; imports and the
lines inside a string do not count. Pairs that share only declarations (fields, constants, rows of tables) are counted
separately: they look alike, but share no logic. The figures point at places worth reading; they are not targets in
themselves.
"""

import ast
import io
import keyword
import re
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

WINDOW = 8  # consecutive lines that count as a duplicate
TOO_COMMON = 8  # a window found in more files than this is an idiom, not a copy
DECLARATION = re.compile(r"@|class |name : |name = (NUMBER|STRING)$|.* [,{(\[]$")  # decorators, fields, table rows
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass
class Module:
    """The contribution of one file to the totals."""

    path: Path
    lines: int = 0
    code: list[str] = field(default_factory=list)  # one entry per line of code, with placeholders; empty for imports
    prose: int = 0  # lines of docstrings, and lines with a comment
    functions: list[int] = field(default_factory=list)  # lines of code of each
    classes: list[str] = field(default_factory=list)
    anys: int = 0


def read(path: Path) -> Module:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    docstrings = docstring_lines(tree)
    shapes: dict[int, list[str]] = defaultdict(list)
    comments = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in LAYOUT:
            shapes[token.start[0]].append(shape(token))
            for line in range(token.start[0] + 1, token.end[0] + 1):  # of a string
                shapes[line].append("")
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            shapes |= {line: [""] for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    code = {line: " ".join(words) for line, words in sorted(shapes.items()) if line not in docstrings}
    return Module(
        path,
        lines=source.count("\n"),
        code=list(code.values()),
        prose=len(docstrings | comments),
        functions=[
            sum(node.lineno <= line <= (node.end_lineno or 0) for line in code)
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ],
        classes=[node.name for node in tree.body if isinstance(node, ast.ClassDef)],
        anys=sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes),
    )


def docstring_lines(tree: ast.AST) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            found.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def shape(token: tokenize.TokenInfo) -> str:
    """The token itself if it belongs to the language, otherwise a placeholder for its kind."""
    if token.type == tokenize.NAME:
        return token.string if keyword.iskeyword(token.string) else "name"
    return token.string if token.type == tokenize.OP else tokenize.tok_name[token.type]


def duplicates(modules: Iterable[Module], *, declarations: bool) -> set[tuple[Path, Path]]:
    """Return pairs of files that share a window of lines; imports, text and lone brackets do not count.

    Without `declarations`, at least half of the lines must be something else.
    """
    places: dict[tuple[str, ...], set[Path]] = defaultdict(set)
    for module in modules:
        lines = [line for line in module.code if len(line) > 3]
        for start in range(len(lines) - WINDOW + 1):
            window = lines[start : start + WINDOW]
            if declarations or 2 * sum(not DECLARATION.match(line) for line in window) >= WINDOW:
                places[tuple(window)].add(module.path)
    return {pair for paths in places.values() if len(paths) <= TOO_COMMON for pair in combinations(sorted(paths), 2)}


def row(name: str, modules: list[Module]) -> str:
    code = sum(len(module.code) for module in modules)
    functions = [length for module in modules for length in module.functions]
    lines = sum(module.lines for module in modules)
    cells = [
        len(modules),
        lines,
        code,
        f"{100 * sum(module.prose for module in modules) / max(lines, 1):.0f}%",
        f"{1000 * len(functions) / max(code, 1):.0f}",
        f"{statistics.median(functions or [0]):.0f}",
        sum(module.anys for module in modules),
    ]
    return f"{name:<22}" + "".join(f"{cell:>12}" for cell in cells)


def main(root: Path) -> None:
    modules = [read(path) for path in sorted(root.rglob("*.py"))]
    folders: dict[str, list[Module]] = defaultdict(list)
    for module in modules:
        folders[str(module.path.relative_to(root).parent)].append(module)
    heads = ("files", "lines", "code", "prose", "funcs/1000", "median", "Any")
    print(f"{'':<22}" + "".join(f"{head:>12}" for head in heads))
    for name, inside in sorted(folders.items()):
        print(row(name, inside))
    print(row("total", modules))

    names = Counter(name for module in modules for name in module.classes)
    repeated = sorted(name for name, times in names.items() if times > 1)
    print(f"\nclass names in several modules: {len(repeated)}  {' '.join(repeated)}")
    pairs = duplicates(modules, declarations=False)
    declared = duplicates(modules, declarations=True) - pairs
    print(f"duplicated places: {len(pairs)}, and {len(declared)} that share only declarations")
    for one, other in sorted(pairs):
        print(f"  {one.relative_to(root)} ~ {other.relative_to(root)}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "openrlhf"))
