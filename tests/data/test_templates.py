"""Chat templates: which tokens of a conversation are learned."""

import pytest

from openrlhf.config.sections.data import TemplateFlags
from openrlhf.data.messages import Conversation
from openrlhf.data.records import Place
from openrlhf.data.templates import RewritesHistory, fill, open_chat
from openrlhf.errors import ConfigError, DataError
from tests.data.chat_words import MARKING, OPENING, REWRITING, STABLE, assistant, user, word_tokenizer

TURNS = [user("one"), assistant("two", reasoning="five"), user("three"), assistant("four", reasoning="six")]


def open_with(template, **settings):
    return open_chat(word_tokenizer(template), TemplateFlags(apply_chat_template=True, **settings))


def conversation(*messages):
    return Conversation(messages, None, Place("data.jsonl", 3))


def learned(marked):
    return [marked.text[start:end] for start, end in marked.spans]


def test_every_turn_is_found_by_prefixes():
    marked = open_with(STABLE).mark_turns(conversation(*TURNS), 0)
    assert marked.text == "<user> one <eos>\n<assistant> two <eos>\n<user> three <eos>\n<assistant> four <eos>\n"
    assert learned(marked) == ["two <eos>", "four <eos>"]


def test_the_last_turn_is_found():
    assert learned(open_with(STABLE).mark_turns(conversation(*TURNS), 3)) == ["four <eos>"]


def test_generation_marks_in_a_template_are_used():
    chat = open_with(MARKING)  # it has no generation prompt, so prefixes alone would not find the turns
    assert learned(chat.mark_turns(conversation(*TURNS), 0)) == ["two <eos>", "four <eos>"]
    assert learned(chat.mark_turns(conversation(*TURNS), 3)) == ["four <eos>"]


def test_a_template_without_assistant_marks_is_rejected():
    chat = open_with(MARKING.replace("== 'assistant'", "== 'nobody'"))
    with pytest.raises(DataError, match=r"^data.jsonl, row 3: the chat template does not mark"):
        chat.mark_turns(conversation(*TURNS), 0)


def test_a_template_that_rewrites_history_is_detected():
    with pytest.raises(RewritesHistory):
        open_with(REWRITING).mark_turns(conversation(*TURNS), 0)


def test_rewritten_history_does_not_matter_to_the_last_turn():
    marked = open_with(REWRITING).mark_response(conversation(*TURNS), 3)
    assert learned(marked) == ["<think> six four <eos>"]
    assert "five" not in marked.text


def test_an_answer_that_does_not_extend_its_prompt_is_rejected_with_the_reason():
    with pytest.raises(
        DataError, match=r"^data.jsonl, row 3: the chat template starts a response.*--tokenizer_chat_te"
    ):
        open_with(OPENING).mark_response(conversation(*TURNS), 3)


def test_newlines_are_learned_only_if_no_eos_precedes_them():
    chat = open_with(STABLE.replace(" <eos>", ""))
    assert learned(chat.mark_turns(conversation(*TURNS), 0)) == ["two\n", "four\n"]


def test_an_opening_assistant_message_is_not_learned():
    assert learned(open_with(STABLE).mark_turns(conversation(assistant("six"), *TURNS), 0)) == [
        "two <eos>",
        "four <eos>",
    ]


def test_the_system_prompt_is_added_to_conversations_without_one(records):
    chat = open_with(STABLE, system_prompt="be kind")
    (record,) = records({})
    assert chat.render(chat.conversation(record, [user("one")])).text == "<system> be kind <eos>\n<user> one <eos>\n"
    own = [{"role": "system", "content": "six"}, user("one")]
    assert chat.conversation(record, own).messages == own


def test_a_row_may_have_its_own_system_message(records):
    chat = open_with(STABLE, system_prompt="be kind", system_key="rules")
    own = [{"role": "system", "content": "six"}, user("one")]
    rows = records({"rules": "two"}, {"rules": ""}, {"rules": None}, {})
    for record, system in zip(rows, ("two", *["be kind"] * 3), strict=True):
        assert chat.conversation(record, [user("one")]).messages == [{"role": "system", "content": system}, user("one")]
        assert chat.conversation(record, own).messages == own
    (wrong,) = records({"rules": 3})
    with pytest.raises(DataError, match="field 'rules': expected text"):
        chat.conversation(wrong, own)


def test_template_kwargs_reach_the_template():
    chat = open_with("{% if loud %}LOUD{% endif %}{{ messages[0].content }}", chat_template_kwargs='{"loud": true}')
    assert chat.render(conversation(user("one"))).text == "LOUDone"


def test_the_override_replaces_the_tokenizers_template():
    assert open_with(STABLE, tokenizer_chat_template="{{ messages | length }}").render(conversation(*TURNS)).text == "4"


def test_without_apply_chat_template_there_is_no_chat():
    assert open_chat(word_tokenizer(), TemplateFlags()) is None


def test_the_error_for_a_missing_template_names_the_flag():
    with pytest.raises(ConfigError, match=r"^--apply_chat_template: the tokenizer has no chat template"):
        open_with(None)


def test_a_template_that_is_not_jinja_is_an_error():
    with pytest.raises(ConfigError, match=r"^the chat template is not valid Jinja: line 1: "):
        open_with("{% for m in messages %}").render(conversation(*TURNS))


@pytest.mark.parametrize("template", ["{{ raise_exception('no tools here') }}", "{{ messages[0].content + 1 }}"])
def test_the_error_of_a_template_names_the_row(template):
    with pytest.raises(DataError, match=r"^data.jsonl, row 3: the chat template rejects this conversation: "):
        open_with(template).render(conversation(*TURNS))


def test_an_input_template_may_contain_other_braces():
    assert fill('{"q": "{}"}', "one") == '{"q": "one"}'
    assert fill(None, "one") == "one"
