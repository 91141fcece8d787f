"""Chats with a tiny model: through a pipe in this process, and in a real terminal as a process."""

import fcntl
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.inference.chat import show
from openrlhf.inference.chat_reply import StreamingDecoder
from tests.commands import DEADLINE, ROOT, as_argv, run_command
from tests.tiny import make_model
from tests.toy_data import answers, write_rows
from tests.warm import warm_python

GREEDY = {"greedy_sampling": True, "max_len": 96}


@pytest.fixture
def chat(models, monkeypatch, capsys):
    """Return a function that sends lines through a pipe and returns standard output and standard error."""

    def start(*lines, **flags):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        run_command("interactive_chat", {"pretrain": models()} | GREEDY | flags)
        captured = capsys.readouterr()
        return captured.out, captured.err

    return start


@pytest.fixture
def plain_reply(models):
    return lambda prompt, **options: continuation(models(), prompt, **options)


@torch.no_grad()
def continuation(folder, prompt, *, max_len=96, ends=(0,)):
    """Return the greedy continuation of a text by plain Transformers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    generated = model.generate(
        ids, do_sample=False, repetition_penalty=1.2, max_length=max_len, eos_token_id=list(ends), pad_token_id=1
    )
    return tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True)


SHORT = "{}="


def test_a_trained_model_is_prompted_as_its_card_says(chat, models, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", answers(8))
    flags = {
        "output_key": "output",
        "input_template": "Q:{} A:",
        "train_batch_size": 8,
        "max_epochs": 1,
        "device": "cpu",
    }
    run_command("train_sft", {"pretrain": models(), "dataset": rows, "save_path": str(tmp_path / "sft")} | flags)
    said = "prompts use the input template 'Q:{} A:', as in training (model card); --input_template overrides it\n"
    reply, stderr = chat("ab", pretrain=str(tmp_path / "sft"))
    assert said in stderr
    assert reply == f"{continuation(tmp_path / 'sft', 'Q:ab A:')}\n"
    assert said not in chat("ab", pretrain=str(tmp_path / "sft"), input_template="{}")[1]


def test_a_transcript_grows_and_clear_starts_over(chat, plain_reply):
    first = plain_reply("User: ab\nAssistant: ")
    out, err = chat("ab", "", "clear", "ab", "exit", "never")
    assert out == f"{first}\n" * 2
    assert "the conversation starts over" in err


def ending_model(folder, prompt):
    """Make a model whose generation config ends a reply at the fifth character after this prompt."""
    make_model(folder)
    reply = continuation(str(folder), prompt)
    end = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(reply[4])
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [0, end], "top_k": 3}))
    return str(folder), (0, end)


def test_a_reply_ends_at_eos_and_history_is_used(chat, tmp_path):
    folder, ends = ending_model(tmp_path / "ending", "User: ab\nAssistant: ")
    first = continuation(folder, "User: ab\nAssistant: ", ends=ends)
    prompt = f"User: ab\nAssistant: {first}\nUser: cd\nAssistant: "
    second = continuation(folder, prompt, ends=ends, max_len=400)
    out, _ = chat("ab", "cd", pretrain=folder, max_len=400)
    assert len(first) <= 5
    assert out == f"{first}\n{second}\n"


def test_with_a_chat_template_the_history_has_turns(chat, tmp_path):
    folder, ends = ending_model(tmp_path / "ending", "<s>be kind<u>ab<a>")
    first = continuation(folder, "<s>be kind<u>ab<a>", ends=ends)
    second = continuation(folder, f"<s>be kind<u>ab<a>{first}</s><u>cd<a>", ends=ends)
    flags = {"pretrain": folder, "apply_chat_template": True}
    assert chat("ab", "cd", system_prompt="be kind", **flags)[0] == f"{first}\n{second}\n"
    (tmp_path / "first.txt").write_text("be kind")
    assert chat("ab", "cd", ta_prompt="first.txt", **flags)[0] == f"{first}\n{second}\n"


def test_a_file_starts_the_history_and_conditional_sft_appends_its_prompt(chat, plain_reply, tmp_path):
    (tmp_path / "first.txt").write_text("1+1=2")
    out, _ = chat("2+2", ta_prompt="first.txt", input_template=SHORT, enable_csft=True, csft_prompt="(good) ")
    assert out == plain_reply("1+1=2\n2+2=(good) ") + "\n"


@pytest.mark.parametrize(
    ("lines", "message"),
    [(['"""ab', 'cd"""'], "ab\ncd"), (['"""', "ab", "", "cd", '"""'], "ab\n\ncd"), (['"""ab"""'], "ab")],
)
def test_triple_quotes_enclose_several_lines(chat, plain_reply, lines, message):
    assert chat(*lines, input_template=SHORT)[0] == plain_reply(f"{message}=") + "\n"


def test_an_unclosed_block_is_sent_as_it_is(chat, plain_reply):
    out, err = chat('"""ab', "cd", input_template=SHORT)
    assert out == plain_reply("ab\ncd=") + "\n"
    assert 'the input ended before the closing """' in err


def test_a_full_context_is_reported_and_a_message_that_does_not_fit_is_rejected(chat, plain_reply):
    out, err = chat("ab", "x" * 96, "clear", "ab", input_template=SHORT)
    assert out == (plain_reply("ab=") + "\n") * 2
    assert err.count("the reply ended because the context is full (--max_len 96). Try: clear to start over") == 2
    assert "no space for a reply within --max_len 96" in err


@pytest.mark.slow(seconds=1)
def test_a_pipe_gets_no_banner_and_exit_code_0(models, plain_reply):
    argv = [*warm_python(), "-m", "openrlhf.cli.interactive_chat", *as_argv({"pretrain": models()} | GREEDY)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        argv, input="ab", capture_output=True, text=True, env=environment, timeout=DEADLINE, check=False
    )
    assert (done.returncode, done.stdout) == (0, plain_reply("User: ab\nAssistant: ") + "\n")
    assert "Ctrl" not in done.stderr
    assert "Loading" not in done.stderr  # Transformers' progress bar
    assert "deprecated" not in done.stderr


def test_temperature_0_is_greedy(chat, plain_reply):
    assert chat("ab", greedy_sampling=None, temperature=0)[0] == plain_reply("User: ab\nAssistant: ") + "\n"


def test_sampling_gives_different_replies(chat):
    torch.manual_seed(0)
    flags = {"greedy_sampling": None, "temperature": 1.0, "top_p": 1.0, "input_template": SHORT}
    assert len(set(chat(*["ab", "clear"] * 4, **flags)[0].split("\n"))) > 4


class ByteTokenizer:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def decode(self, token_ids, *, skip_special_tokens):
        assert skip_special_tokens
        return bytes(token_ids).decode(errors="replace")


def test_a_character_is_shown_when_all_its_bytes_have_arrived():
    pieces = []
    decoder = StreamingDecoder(ByteTokenizer(), pieces.append)
    for byte in "aж語b".encode() + b"\xe8":
        decoder.put(byte)
    decoder.finish()
    assert pieces == ["a", "ж", "語", "b", "\N{REPLACEMENT CHARACTER}"]


# a terminal


HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\rover\x7f\b\0"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_control_characters_of_a_reply_are_shown_on_a_terminal_and_unchanged_in_a_pipe(monkeypatch, is_terminal):
    reader, writer = pty.openpty() if is_terminal else os.pipe()
    text = f"a\tb {HOSTILE} é語👩‍🔬\n"
    with os.fdopen(reader, "rb"), os.fdopen(writer, "w", encoding="utf-8") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        show(text)
        monkeypatch.undo()
        received = os.read(reader, 1000).decode()
    shown = r"\x1b]0;title\x07\x1b[2J\x9b31m\x0dover\x7f\x08\x00"
    assert received == (f"a\tb {shown} é語👩‍🔬\r\n" if is_terminal else text)


class Terminal:
    """A program in its own pseudo-terminal: send keys, wait for output."""

    def __init__(self, program, master):
        self.program = program
        self.master = master
        self.screen = ""
        self.ends = time.monotonic() + DEADLINE

    def press(self, keys):
        os.write(self.master, keys.encode())

    def wait_for(self, text):
        """Wait until the text is on the screen, and drop the output up to it."""
        while text not in self.screen:
            self.wait_for_output()
        self.screen = self.screen.partition(text)[2]

    def interrupt(self, number, answer):
        """Send a signal, and send it again if nothing happens, as a person would press Ctrl-C again.

        Python's readline misses a signal that arrives after it shows the prompt and before it waits for keys.
        """
        while answer not in self.screen:
            assert time.monotonic() < self.ends, f"deaf to {number!r}: {self.screen}"
            self.press("\x03") if number == signal.SIGINT else self.program.send_signal(number)
            while answer not in self.screen and self.has_output_within(5):
                pass
        self.wait_for(answer)

    def wait_for_output(self):
        assert self.has_output_within(self.ends - time.monotonic()), self.screen

    def has_output_within(self, seconds):
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        self.screen = (self.screen + os.read(self.master, 65536).decode(errors="replace")).replace("\r\n", "\n")
        return True


@contextmanager
def terminal(**flags):
    master, slave = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-m", "openrlhf.cli.interactive_chat", *as_argv(flags)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C sends a signal
    )
    os.close(slave)
    try:
        yield Terminal(program, master)
    finally:
        program.kill()
        program.wait()
        os.close(master)


@pytest.mark.slow(seconds=8)
def test_chat_works_in_a_terminal(tmp_path):
    folder, ends = ending_model(tmp_path / "ending", "ab=")
    first, block = (continuation(folder, prompt, ends=ends) for prompt in ("ab=", "x\ny="))
    second = continuation(folder, f"ab={first}\nab=", ends=ends)
    with terminal(pretrain=folder, input_template=SHORT, **GREEDY) as screen:
        screen.wait_for('""" begins and ends a message of several lines')
        screen.wait_for("> ")
        screen.press("ab\r")
        screen.wait_for(f"ab\n{first}\n")
        screen.wait_for("> ")
        screen.press("\x10\r")  # Ctrl-P: the previous line
        screen.wait_for(f"ab\n{second}\n")
        screen.wait_for("> ")
        screen.press("clear\r")
        screen.wait_for("the conversation starts over")
        screen.wait_for("> ")
        for line in ('"""', "x", 'y"""'):
            screen.press(f"{line}\r")
        screen.wait_for(f'y"""\n{block}\n')
        screen.wait_for("> ")
        screen.press("exit\r")
        assert screen.program.wait(DEADLINE) == 0


@pytest.mark.slow(seconds=8)
def test_ctrl_c_stops_the_reply_but_not_the_program(tmp_path):
    folder = make_model(tmp_path / "endless", sharp=True, max_position_embeddings=1_000_000)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():  # the logit of EOS is 0, so a greedy reply never ends by itself, however late Ctrl-C comes
        model.lm_head.weight[model.config.eos_token_id] = 0
    model.save_pretrained(folder)
    with terminal(pretrain=folder, max_len=1_000_000, greedy_sampling=True, input_template=SHORT) as screen:
        screen.wait_for("> ")
        screen.press("ab")
        screen.wait_for("ab")  # the line is being read
        screen.interrupt(signal.SIGINT, "interrupted; exit or Ctrl-D quits")
        screen.wait_for("> ")
        for message in ("ab", "cd"):  # the chat continues afterwards
            screen.press(f"{message}\r")
            screen.wait_for(f"{message}\n")
            screen.wait_for_output()  # the reply has started
            screen.press("\x03")
            screen.wait_for("the reply was interrupted")
            screen.wait_for("> ")
        screen.press("\x04")
        assert screen.program.wait(DEADLINE) == 0


@pytest.mark.slow(seconds=7)
def test_sigterm_ends_the_program(models):
    with terminal(pretrain=models(), **GREEDY) as screen:
        screen.wait_for("> ")
        screen.interrupt(signal.SIGTERM, "openrlhf: interrupted")
        assert screen.program.wait(DEADLINE) == 130
