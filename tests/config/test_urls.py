import pytest

from openrlhf.config.urls import mask_urls


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("http://127.0.0.1:5000/get_reward", "http://127.0.0.1:5000/get_reward"),
        ("http://me:word@host/path", "http://***@host/path"),
        ("https://word@[::1]:80", "https://***@[::1]:80"),
        ("http://a:b@c@host", "http://***@host"),
        ("http://host/?token=word&page=2#word", "http://host/?token=***&page=***#***"),
        ("http://host/path#word?word, http://two#word", "http://host/path#***, http://two#***"),
        ("http://me:pass word@host/?token=one two#three four", "http://***@host/?token=***#***"),
        ("http://host/?word", "http://host/?***"),
        ("http://a:b@one/x?k=v, http://c:d@two", "http://***@one/x?k=***, http://***@two"),
        ("./rewards/mail@home.py", "./rewards/mail@home.py"),
    ],
)
def test_possible_secrets_are_masked(given, shown):
    assert mask_urls(given) == shown
