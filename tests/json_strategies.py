"""Hypothesis strategies for JSON from outside: any value, and values that are almost valid."""

import json

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# The same examples in every run; a test gives its fixtures to all of them.
FUZZING = settings(
    derandomize=True,
    deadline=None,
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)

words = st.sampled_from(["one", "two three", "one ки", "+", '{"name": "f", "arguments": {}}'])
texts = st.one_of(words, st.sampled_from(["", " ", "{", "[1]", "null", "\0"]), st.text(max_size=12))
numbers = st.one_of(
    st.booleans(), st.integers(-2, 3), st.floats(), st.sampled_from([10**400, -(10**400), 1e308, float("nan")])
)
values = st.recursive(
    st.one_of(st.none(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)


def mostly(right):
    """Draw a value that is right ten times out of eleven, else any value."""
    return st.sampled_from(range(11)).flatmap(lambda number: values if number == 5 else right)


def some_of(**fields):
    """Draw an object with some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


arguments = st.one_of(values, values.map(json.dumps))
functions = st.fixed_dictionaries({"name": mostly(texts), "arguments": mostly(arguments)})
calls = st.one_of(some_of(id=texts, type=texts, function=mostly(functions)), functions)
contents = st.one_of(texts, st.none(), st.lists(some_of(type=texts, text=mostly(texts)), max_size=2))


def messages(*roles):
    """Draw a message of one of these roles, in either format."""
    role = mostly(st.sampled_from(roles))
    more = {"tool_calls": mostly(st.lists(mostly(calls), max_size=2)), "name": values, "call_text": values}
    return st.one_of(
        st.fixed_dictionaries({"role": role, "content": mostly(words)}),
        st.fixed_dictionaries({"role": role, "content": mostly(contents)}, optional=more),
        st.fixed_dictionaries({"from": role, "value": mostly(texts)}),
    )


conversations = st.one_of(
    st.tuples(messages("user"), messages("assistant")).map(list),
    st.tuples(messages("user", "human"), messages("assistant", "gpt", "function_call")).map(list),
    st.lists(mostly(messages("user", "assistant", "system", "tool", "gpt", "human", "observation")), max_size=4),
)
tools = st.one_of(st.lists(mostly(some_of(type=texts, name=texts, function=mostly(functions))), max_size=2), texts)
