"""`posttrain check`: seeded faults are found, each of them; clean files of ten formats have none."""

from __future__ import annotations

import importlib.util
import json
import time

import pytest
import yaml

from tests import tiny
from tests.cli.runs import COMMON, folder_with_inputs, posttrain

COUNT = 60
WORDS = [
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "flint",
    "grove",
    "heath",
    "inlet",
    "jetty",
    "knoll",
    "larch",
    "maple",
    "north",
    "ocean",
    "pearl",
    "quartz",
    "river",
]


def words(i, size=6):
    return " ".join(WORDS[(i * 7 + k * (k + 3)) % len(WORDS)] + str(i + k) for k in range(size))


def chat(i, answer=None):
    return {
        "messages": [
            {"role": "user", "content": f"Tell me of {words(i)}?"},
            {"role": "assistant", "content": answer or words(i + 9)},
        ]
    }


def completion(i):
    return {"prompt": f"Tell me of {words(i)}?", "completion": f" {words(i + 9)}."}


def pair(i):
    longer, shorter = words(i + 9, 8), words(i + 31, 5)
    chosen, rejected = (longer, shorter) if i % 2 else (shorter, longer)
    return {"prompt": f"Tell me of {words(i)}?", "chosen": f" {chosen}.", "rejected": f" {rejected}."}


def changed(make, place=17, **values):
    """Rows of which one is changed."""
    rows = [make(i) for i in range(COUNT)]
    rows[place] = {**rows[place], **values}
    return rows


def turns(*messages):
    return changed(chat, messages=[{"role": role, "content": content} for role, content in messages])


ALL = range(COUNT)
EOS = tiny.tokenizer().eos_token_id
FAULTS = {
    # name: (method, rows, further options, kind or words of the finding)
    "empty answer": ("sft", turns(("user", "a"), ("assistant", "")), {}, "empty"),
    "unknown role": ("sft", turns(("user", "a"), ("asistant", "b")), {}, "role"),
    "two questions running": ("sft", turns(("user", "a"), ("user", "b"), ("assistant", "c")), {}, "two_users"),
    "the answer first": ("sft", turns(("assistant", "a"), ("user", "b"), ("assistant", "c")), {}, "assistant_first"),
    "no answer": ("sft", turns(("user", "a")), {}, "assistant"),
    "no message": ("sft", changed(chat, messages=[]), {}, "empty"),
    "content of null": ("sft", turns(("user", "a"), ("assistant", None)), {}, "bad"),
    "content of a number": ("sft", turns(("user", "a"), ("assistant", 7)), {}, "type"),
    "an extra key": ("sft", changed(chat, messages=[{"role": "user", "content": "a", "nmae": "x"}, {"role": "assistant", "content": "b"}]), {}, "key"),
    "empty completion": ("sft", changed(completion, completion=""), {}, "empty"),
    "completion of null": ("sft", changed(completion, completion=None), {}, "bad"),
    "completion of a number": ("sft", changed(completion, completion=12), {}, "type"),
    "empty prompt": ("dpo", changed(pair, prompt=""), {}, "empty"),
    "a prompt that leaves no room": ("sft", changed(completion, prompt=words(3, 90)), {"max_length": 64}, "trained token"),
    "many rows cut": ("sft", [{"prompt": "a", "completion": words(i, 60)} for i in ALL], {"max_length": 32}, "truncated"),
    "empty text": ("sft", [{"text": words(i) if i != 5 else " "} for i in ALL], {}, "blank"),
    "control tokens in text": ("sft", [{"text": words(i) + (" <|im_end|>" if i == 5 else "")} for i in ALL], {}, "control_tokens"),
    "repeated rows": ("sft", [completion(i // 2) for i in ALL], {}, "duplicate_rows"),
    "one prompt for most": ("grpo", [{"prompt": "Say it." if i % 4 else words(i)} for i in ALL], {}, "duplicate"),
    "labels shorter than ids": ("sft", changed(lambda i: {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, labels=[5, 6]), {}, "bad"),
    "no ids": ("sft", changed(lambda i: {"input_ids": [5 + i % 9, 6, 7]}, input_ids=[]), {}, "bad"),
    "ids outside the vocabulary": ("sft", changed(lambda i: {"input_ids": [5 + i % 9, 6, 7]}, input_ids=[5, 10**6]), {}, "bad"),
    "equal answers": ("dpo", changed(pair, chosen=" same.", rejected=" same."), {}, "equal_pair"),
    "empty chosen": ("dpo", changed(pair, chosen=""), {}, "empty"),
    "a pair turned round": ("dpo", [*map(pair, range(50)), {**pair(3), "chosen": pair(3)["rejected"], "rejected": pair(3)["chosen"]}], {}, "contradict"),
    "the longer one is preferred": ("dpo", [{"prompt": words(i), "chosen": words(i + 3, 9), "rejected": words(i + 5, 2)} for i in ALL], {}, "longer"),
    "answers that hardly differ": ("dpo", [{"prompt": words(i), "chosen": words(i, 20) + f" x{i}", "rejected": words(i, 20) + f" y{i}"} for i in ALL], {}, "nearly_equal_pair"),
    "answers that repeat the prompt": ("dpo", [{"prompt": words(i), "chosen": words(i) + words(i + 9, 3 + i % 2), "rejected": words(i + 5, 9)} for i in ALL], {}, "own prompt"),
    "no column": ("dpo", [completion(i) for i in ALL], {}, "chosen"),
    "evaluated rows are trained on": ("sft", [completion(i) for i in ALL], {"eval_dataset_name": [completion(i + 50) for i in range(20)]}, "overlap_whole"),
    "evaluated prompts are trained on": ("sft", [completion(i) for i in ALL], {"eval_dataset_name": [{**completion(i), "completion": " Else."} for i in range(9)]}, "overlap_prompts"),
    "a line that is not JSON": ("sft", '{"text": "a"}\n{"text": "b\n', {}, "line 2"),
    "bytes that are not UTF-8": ("sft", b'{"text": "a"}\n{"text": "\xff"}\n', {}, "UTF-8"),
    "an argument of a reward": ("grpo", [{"prompt": words(i), "answer": str(i)} for i in ALL], {"reward_funcs": ["accuracy_reward"]}, "needs the argument 'solution', but there is no such column in the dataset; it has answer beside the prompt. Rename the column: --dataset_columns '{\"answer\": \"solution\"}'"),
    "a reward that cannot be imported": ("grpo", [{"prompt": words(i)} for i in ALL], {"reward_funcs": ["no_such_module.reward"]}, "no_such_module"),
    "a tool that is not there": ("grpo", [{"prompt": chat(i)["messages"][:1]} for i in ALL], {"reward_funcs": ["think_format_reward"], "tools": ["json.no_such_tool"]}, "no_such_tool"),
    "a tool without a description": ("grpo", [{"prompt": words(i)} for i in ALL], {"reward_funcs": ["think_format_reward"], "tools": ["json.dumps"]}, "Tool dumps cannot be described"),
    "no reward": ("grpo", [{"prompt": words(i)} for i in ALL], {"reward_funcs": []}, "needs a reward"),
    "questions without the template": ("sft", [completion(i) for i in ALL], {}, "no_template: the rows are plain texts"),
    "pairs without the template": ("dpo", [pair(i) for i in ALL], {}, "no_template"),
    "turns of users are trained": ("sft", [chat(i) for i in ALL], {}, "trained_turns: all turns are trained, those of system and user too"),
    "columns that nothing reads": ("sft", [{**chat(i), "source": "web", "text": "x"} for i in ALL], {}, "nothing reads the columns 'source', 'text'"),
    "columns that no reward reads": ("grpo", [{"prompt": words(i), "solution": "1", "more": 1} for i in ALL], {"reward_funcs": ["shlex.quote"]}, "ignored_columns: nothing reads the columns 'solution', 'more'"),
    "half of a surrogate pair": ("sft", '{"text": "a"}\n{"text": "\\ud83d"}\n', {}, "surrogate"),
}  # fmt: skip
TEMPLATES = {
    "the stop is not trained": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}", "end-of-turn"),
    "no generation prompt": ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}", "generation prompt"),
    "earlier turns are changed": ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last or m.role == 'user' else '...' }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "changes earlier turns"),
    "answers are refused": ("{% for m in messages %}{{ raise_exception('no') if m.role == 'assistant' }}{{ m.content }}{% endfor %}", "refuses"),
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}
CLEAN = {
    "messages": ("sft", [chat(i) for i in ALL]),
    "prompt and completion": ("sft", [completion(i) for i in ALL]),
    "text": ("sft", [{"text": words(i, 12)} for i in ALL]),
    "chat prompt and completion": ("sft", [{"prompt": chat(i)["messages"][:1], "completion": chat(i)["messages"][1:]} for i in ALL]),
    "Alpaca": ("sft", [{"instruction": f"Tell of {words(i)}", "input": "", "output": words(i + 9)} for i in ALL]),
    "ShareGPT": ("sft", [{"conversations": [{"from": "human", "value": words(i)}, {"from": "gpt", "value": words(i + 9)}]} for i in ALL]),
    "tokenised": ("sft", [{"input_ids": [5 + (i * k) % 90 for k in range(1, 9)] + [5 + i, EOS]} for i in ALL]),
    "pairs": ("dpo", [pair(i) for i in ALL]),
    "pairs for a reward model": ("reward", [pair(i) for i in ALL]),
    "prompts": ("grpo", [{"prompt": chat(i)["messages"][:1], "answer": str(i)} for i in ALL]),
    "tools": ("sft", [{**chat(i), "tools": [TOOL]} for i in ALL]),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.causal_lm().config.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def checked(folder, model, method, rows, **options):
    """(exit code, the report) of a check of these rows."""

    def written(name, content):
        data = "".join(json.dumps(row) + "\n" for row in content) if isinstance(content, list) else content
        path = folder / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return str(path)

    named = {"dataset_name": written("rows.jsonl", rows), "model_name_or_path": str(model)}
    if "eval_dataset_name" in options:
        options["eval_dataset_name"] = written("eval.jsonl", options["eval_dataset_name"])
        options |= {"eval_strategy": "steps", "eval_steps": 1}
    values = {
        **COMMON,
        **named,
        "output_dir": str(folder / "out"),
        "dataset_cache_dir": str(folder / "cache"),
        "method": method,
        **({"num_generations": 4, "reward_funcs": ["think_format_reward"]} if method == "grpo" else {}),
        **options,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    code = posttrain("check", str(folder / "run.yaml"), "--json", str(folder / "report.json"))
    return code, json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(tmp_path, model, name):
    method, rows, options, wanted = FAULTS[name]
    code, report = checked(tmp_path, model, method, rows, **options)
    told = [f"{one['kind']}: {one['sentence']}" for one in report["findings"]]
    assert any(wanted in one for one in told), told
    assert code == (1 if report["errors"] else 0)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_s_fault_is_found(tmp_path, model, name):
    template, wanted = TEMPLATES[name]
    (tmp_path / "template.jinja").write_text(template)
    options = {"chat_template_path": str(tmp_path / "template.jinja")}
    _, report = checked(tmp_path, model, "sft", [chat(i) for i in ALL], **options)
    assert any(wanted in one["sentence"] for one in report["findings"]), report["findings"]


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory):
    """One without a chat template, whose rows are plain texts."""
    folder = tmp_path_factory.mktemp("plain_model")
    tiny.causal_lm().config.save_pretrained(folder)
    tiny.tokenizer(None).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CLEAN)
def test_clean_rows_have_no_fault(tmp_path, model, plain_model, name):
    method, rows = CLEAN[name]
    is_plain = isinstance(rows[0].get("prompt"), str)
    code, report = checked(tmp_path, plain_model if is_plain else model, method, rows)
    assert (code, [one for one in report["findings"] if one["severity"] != "note"]) == (0, [])
    notes = [one["kind"] for one in report["findings"]]
    assert notes == (["trained_turns"] if name in ("messages", "ShareGPT", "tools") else [])
    assert report["datasets"][0]["rows"] == len(rows)


def test_counts_are_of_rows(tmp_path, model):
    """A row with two faults of a kind is one row, and is named once."""
    rows = [pair(0), {"prompt": "a", "chosen": "", "rejected": ""}, pair(2)]
    code, report = checked(tmp_path, model, "dpo", rows)
    (empty,) = [one for one in report["findings"] if "cannot be trained on" in one["sentence"]]
    assert (code, empty["count"], empty["rows"]) == (1, 1, [1])
    assert empty["sentence"].startswith("1 of 3 rows")


def test_packages_that_are_not_there_are_named(tmp_path, model, monkeypatch):
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, find=importlib.util.find_spec: find(name) if "outlines" not in name else None,
    )
    monkeypatch.setattr(
        "transformers.integrations.integration_utils.get_available_reporting_integrations", lambda: ["tensorboard"]
    )
    options = {"vllm_structured_outputs_regex": "a+", "report_to": ["wandb", "tensorboard"]}
    code, report = checked(tmp_path, model, "grpo", [{"prompt": chat(i)["messages"][:1]} for i in ALL], **options)
    told = [one["sentence"] for one in report["findings"] if one["kind"] == "package"]
    assert code == 0
    assert told == [
        "`vllm_structured_outputs_regex` needs a package that is not installed on this machine: pip install outlines-core",
        "`report_to` wandb needs a package that is not installed on this machine: pip install wandb",
    ]


@pytest.mark.parametrize("text", ["Привет, мир", "こんにちは", "नमस्ते 👋🏽", "Zoë"])
def test_every_script_is_shown_as_it_is_written(tmp_path, model, capsys, text):
    rows = [{"prompt": f"{text} {i}", "completion": f" {text}"} for i in range(3)]
    checked(tmp_path, model, "sft", rows)
    shown = capsys.readouterr().out
    assert text in shown
    assert "\N{REPLACEMENT CHARACTER}" not in shown


def test_samples_are_shown_token_by_token(tmp_path, model, capsys):
    checked(tmp_path, model, "sft", [completion(i) for i in ALL], max_length=90)
    shown = capsys.readouterr().out
    assert "context" in shown
    assert " trained" in shown
    assert "cut" in shown
    assert "Tokens a sample:" in shown


@pytest.mark.trust
def test_a_hundred_thousand_rows_in_two_minutes(tmp_path, model):
    rows = [{"prompt": f"Tell me of {words(i)}?", "completion": f" {words(i + 9, 12)} {i}."} for i in range(100_000)]
    start = time.perf_counter()
    code, report = checked(tmp_path, model, "sft", rows)
    took = time.perf_counter() - start
    print(f"100,000 rows, {report['datasets'][0]['tokens']:,} tokens: {took:.0f} s")
    assert code == 0
    assert took < 120


def test_gold_shows_how_two_tokenizers_cut_and_others_refuse_them(tmp_path, capsys):
    inputs, tokenizer = folder_with_inputs(tmp_path), tiny.merging_tokenizer()
    tiny.causal_lm(vocab_size=len(tokenizer)).save_pretrained(inputs / "teacher")
    tokenizer.save_pretrained(inputs / "teacher")
    shared = ["--model_name_or_path", str(inputs / "model"), "--teacher_model_name_or_path", str(inputs / "teacher")]
    shared += ["--dataset_name", str(inputs / "gold.jsonl"), "--samples", "1"]
    assert posttrain("check", "gold", *shared, "--use_uld_loss", "true") == 0
    shown = capsys.readouterr().out
    assert "teacher: 9 tokens are 5 of the teacher's, compared at 5 places:  |I|t =  It   |i|s =  is     0  ." in shown
    assert posttrain("check", "gold", *shared) == 1
    assert "The tokenizers of the student and of the teacher" in capsys.readouterr().out
