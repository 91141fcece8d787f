"""JSON for the page's scripts: dataclasses become objects with the same names."""

from __future__ import annotations

import json

from openrlhf.view.viewer import ShownSample


def to_json(value: object) -> bytes:
    """Return ASCII JSON of dataclasses, lists and plain values; every number must be finite."""
    return json.dumps(value, default=_fields, allow_nan=False, separators=(",", ":")).encode("ascii")


def _fields(value: object) -> object:
    if isinstance(value, ShownSample):  # flat, as the scripts read it
        own = {"id": value.id, "length": value.length, "turns": value.turns, "texts": value.texts}
        return own | vars(value.sample)
    return vars(value)  # unlike `asdict`, it does not copy every token
