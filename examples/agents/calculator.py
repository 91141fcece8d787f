"""An agent with a tool: <calc>2 * (3 + 4)</calc> is answered with its value, <answer>14</answer> ends the episode.

The label is the correct number. The prompt should explain both tags. `--stop` ends a turn when the tool has to respond:

    python -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-1.5B-Instruct --prompt_data openai/gsm8k@main \\
        --input_key question --label_key answer --apply_chat_template --advantage_estimator group_norm \\
        --n_samples_per_prompt 8 --stop "</calc>" "</answer>" --max_turns 6 \\
        --agent_func_path examples/agents/calculator.py
"""

import ast
import math
import operator
import re

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
LONGEST = 200  # maximum characters of an expression
CALL = re.compile(r"<calc>([^<]*)(?:</calc>)?\s*$")
ANSWER = re.compile(r"<answer>([^<]*)(?:</answer>)?")


class Calculator(AgentInstanceBase):
    """Responds to calls until the policy gives an answer; a turn with neither ends the episode."""

    def __init__(self, *args, **kwargs):
        self.calls = 0

    async def step(self, states, **kwargs):
        action = states["action_text"].replace("</s>", "").replace("<|im_end|>", "")
        answer, call = ANSWER.search(action), CALL.search(action)
        right = answer is not None and close(value_of(answer[1]), value_of(str(states["label"]).rsplit("####", 1)[-1]))
        done = answer is not None or call is None
        self.calls += not done
        return {
            "rewards": float(right) if done else 0.0,
            "scores": float(right),
            "environment_feedback": "" if done else f"<result>{shown(value_of(call[1]))}</result>\n",
            "done": done,
            "sampling_params": states["sampling_params"],
            "extra_logs": {"tool_calls": self.calls, "answered": float(answer is not None)},
        }


def value_of(text):
    """The value of an arithmetic expression, or None."""
    text = text.strip().replace(",", "").lstrip("$")
    if not text or len(text) > LONGEST:
        return None
    try:
        return evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return None


def evaluate(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.operand))
    raise ValueError("only numbers, brackets and + - * / // % are understood")


def shown(value):
    return "not an expression" if value is None else f"{value:.10g}"


def close(value, wanted):
    return value is not None and wanted is not None and math.isclose(value, wanted, rel_tol=1e-6)


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Calculator)
