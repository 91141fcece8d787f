"""Server addresses without their secrets, for messages and files."""

import re

CREDENTIALS = re.compile(r"(?<=://)[^/?#,]*@")  # user:password@
QUERY_VALUE = re.compile(r"(?<=[?&])([^=&#,]*=)?[^&#,]+")  # token=...
FRAGMENT = re.compile(r"(://[^#,]*#)[^,]+")


def mask_urls(text: str) -> str:
    """Replace the parts of URLs that may be secret with ***: user, password, query values and fragment."""
    return FRAGMENT.sub(r"\1***", QUERY_VALUE.sub(r"\1***", CREDENTIALS.sub("***@", text)))
