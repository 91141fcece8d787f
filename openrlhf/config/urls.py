"""Server addresses without their secrets, for messages and files."""

import re

CREDENTIALS = re.compile(r"(?<=://)[^/?#,\s]*@")  # user:password@
QUERY_VALUE = re.compile(r"(?<=[?&])([^=&#,\s]*=)?[^&#,\s]+")  # token=...


def mask_urls(text: str) -> str:
    """Replace the parts of URLs that may be secret with ***: user, password and the values of the query."""
    return QUERY_VALUE.sub(r"\1***", CREDENTIALS.sub("***@", text))
