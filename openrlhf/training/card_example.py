"""Example code of a model card: load the model and prompt it in the format that it was trained with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from openrlhf.training.prompt_format import PromptFormat


class Kind(Enum):
    """The kind of a saved model."""

    LANGUAGE = "language model"
    REWARD = "reward model"
    PROCESS_REWARD = "process reward model"
    CRITIC = "critic"

    @property
    def scores(self) -> bool:
        """Whether the model has a scalar head instead of a vocabulary head."""
        return self in (Kind.REWARD, Kind.CRITIC)


@dataclass(frozen=True)
class Example:
    """The facts that the example code depends on."""

    path: str  # folder or repository to load from
    kind: Kind
    prompt: PromptFormat
    is_adapter: bool = False
    head: str = "score"  # name of a scalar head
    step_token: str = ""  # token that ends a step, of a process reward model
    step_labels: tuple[str, ...] = ()  # tokens that judge a step, the positive one first

    def code(self) -> str:
        """Return a Python program that runs the model on one example."""
        if self.kind.scores:
            return "\n".join([*self._load("SequenceClassification"), "", *self._score()])
        body = self._judge() if self.kind is Kind.PROCESS_REWARD else self._generate()
        return "\n".join([*self._load("CausalLM"), "", *body])

    def _load(self, task: str) -> list[str]:
        auto = f"AutoPeftModelFor{task}" if self.is_adapter else f"AutoModelFor{task}"
        source = (
            ["from peft import " + auto, "from transformers import AutoTokenizer"]
            if self.is_adapter
            else [f"from transformers import {auto}, AutoTokenizer"]
        )
        labels = ", num_labels=1" if self.kind.scores else ""
        renamed = f', key_mapping={{r"^{self.head}\\.": "score."}}' if self.kind.scores and self.head != "score" else ""
        torch = ["import torch"] if self.kind is not Kind.LANGUAGE else []
        return [
            *torch,
            *source,
            "",
            f"path = {self.path!r}",
            "tokenizer = AutoTokenizer.from_pretrained(path)",
            f'model = {auto}.from_pretrained(path, dtype="auto"{labels}{renamed})',
        ]

    def _generate(self) -> list[str]:
        prompt = self.prompt
        if not prompt.chat:
            inputs = [
                f"prompt = {prompt.text('Your question')!r}",
                'inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)',
            ]
        else:
            inputs = [
                f"messages = {prompt.messages('Your question')!r}",
                "inputs = tokenizer.apply_chat_template(",
                f'    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True'
                f"{self._template_arguments()}",
                ")",
            ]
        return [
            *inputs,
            "output = model.generate(**inputs, max_new_tokens=256)",
            "print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))",
        ]

    def _score(self) -> list[str]:
        prompt = self.prompt
        if prompt.chat:
            messages = [*prompt.messages("Your question"), {"role": "assistant", "content": "An answer"}]
            text = f"tokenizer.apply_chat_template({messages!r}, tokenize=False{self._template_arguments()})"
        else:
            text = repr(prompt.text("Your question") + "An answer")
        return [
            f"text = {text}",
            "text = text.rstrip().removesuffix(tokenizer.eos_token) + tokenizer.eos_token  # scored at its end",
            'inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)',
            "with torch.no_grad():",
            "    print(model(**inputs).logits.item())",
        ]

    def _judge(self) -> list[str]:
        if self.step_labels:
            labels = f"[tokenizer.encode(label, add_special_tokens=False)[0] for label in {list(self.step_labels)!r}]"
            answer = [
                f"labels = {labels}",
                "print(logits[:, labels].softmax(-1)[:, 0].tolist())  # probability of the first label, per step",
            ]
        else:
            answer = ["print(tokenizer.batch_decode(logits.argmax(-1)))  # the most likely label, per step"]
        return [
            f"end = {self.step_token!r}  # ends each step",
            "text = ''.join(step + end for step in ['First step', 'Second step'])",
            'inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)',
            "ends = inputs.input_ids[0] == tokenizer.encode(end, add_special_tokens=False)[0]",
            "with torch.no_grad():",
            "    logits = model(input_ids=inputs.input_ids).logits[0, ends]  # one row per step",
            *answer,
        ]

    def _template_arguments(self) -> str:
        """Return the arguments of `apply_chat_template` that differ from its defaults."""
        prompt = self.prompt
        extra = "".join(f", {name}={value!r}" for name, value in prompt.chat_template_kwargs.items())
        return extra + (f", chat_template={prompt.chat_template!r}" if prompt.chat_template else "")
