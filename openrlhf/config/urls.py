"""Addresses of servers, in the form in which messages and files may show them."""

import re

CREDENTIALS = re.compile(r"(?<=://)[^/?#,\s]*@")  # user:password@
QUERY_VALUE = re.compile(r"(?<=[?&])([^=&#,\s]*=)?[^&#,\s]+")  # token=...


def mask_urls(text: str) -> str:
    """Replace what may be secret in one or several URLs by ***: user and password, and the values of the query."""
    return QUERY_VALUE.sub(r"\1***", CREDENTIALS.sub("***@", text))
