"""An agent written for any OpenAI-compatible server: a loop around the client, with one tool.

Nothing in it depends on training. The label is the correct number; the reward is 1 if the last message contains it:

    python -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-1.5B-Instruct --prompt_data openai/gsm8k@main \\
        --input_key question --label_key answer --advantage_estimator group_norm --n_samples_per_prompt 8 \\
        --max_len 4096 --max_new_tokens 512 --max_turns 6 --agent_func_path examples/agents/openai_tools.py

The chat template is applied to the agent's messages, so --apply_chat_template is left out.
"""

import json
import re

from openai import AsyncOpenAI

SYSTEM = "Solve the problem. Use the tool for every calculation. End with the number alone on the last line."
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Apply + - * or / to two numbers",
        "parameters": {
            "type": "object",
            "properties": {
                "left": {"type": "number"},
                "sign": {"type": "string", "enum": ["+", "-", "*", "/"]},
                "right": {"type": "number"},
            },
            "required": ["left", "sign", "right"],
        },
    },
}
SIGNS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}


async def run_agent(base_url, api_key, prompt, label):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        return await solve(client, prompt, label)


async def solve(client, prompt, label):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
    used = 0
    while True:
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            used += 1
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    right = last_number(message.content or "") == last_number(str(label))
    return {"reward": float(right), "extra_logs": {"tool_calls": used}}


def calculate(arguments):
    """Return the result as text; an error message is also returned, for the policy to read."""
    try:
        given = json.loads(arguments)
        return f"{SIGNS[given['sign']](float(given['left']), float(given['right'])):.10g}"
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        return f"not a calculation: {error}"


def last_number(text):
    found = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(found[-1]) if found else None
