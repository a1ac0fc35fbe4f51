"""The server with a real model, as a process: our own engine, and vLLM where POSTTRAIN_VLLM_PYTHON names its python."""

import os
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from posttrain.serve.wire.payload import encode_manifest
from posttrain.serve.wire.shared_blocks import default_folder
from tests import tiny
from tests.serve.live_server import LiveServer, NativeLiveServer
from tests.serve.serving import update_of
from tests.with_vllm import PYTHON, needs_vllm

ENGINES = ["native", pytest.param("vllm", marks=needs_vllm)]
vllm_only = pytest.mark.parametrize("engine", [pytest.param("vllm", marks=needs_vllm)], indirect=True)
CONTEXT, NEW = 1024, 12
PROMPTS = [[1, 5, 9], [7, 3, 3, 8, 20, 41], [100], list(range(2, 40))]


def tiny_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tiny.tokenizer()),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():  # far enough from the initial numbers for every tensor to matter
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@torch.no_grad()
def greedy(model, prompt):
    """(ids, log-probs) of the most likely tokens, one forward pass each: nothing cached, nothing clever."""
    ids, logps = list(prompt), []
    for _ in range(NEW):
        row = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(row.argmax()))
        logps.append(float(row.max()))
    return ids[len(prompt) :], logps


@torch.no_grad()
def scores(model, ids):
    rows = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows, rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model(0).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=ENGINES)
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def start(engine, folder, tmp_path_factory):
    started = []
    make_server, python, slots = {
        "native": (NativeLiveServer, None, '{"max_slots": 8}'),
        "vllm": (LiveServer, PYTHON, '{"max_num_seqs": 8}'),
    }[engine]

    def make(*more, until="/ready"):
        log = tmp_path_factory.mktemp("log") / "server.log"
        server = make_server(
            python, log, "--model", str(folder), "--dtype", "float32", "--context-length", str(CONTEXT),
            "--engine-args", slots, *more,
        )  # fmt: skip
        started.append(server)
        server.wait_until_ready(300, until)
        return server

    yield make
    for server in started:
        server.close()


@pytest.fixture(scope="module")
def server(start):
    return start()


def completions(server, version, name, **sampling):
    body = {
        "request_id": f"{name}-{version}",
        "prompts": [{"ids": prompt} for prompt in PROMPTS],
        "sampling": {"max_tokens": NEW, "temperature": 0.0} | sampling,
        "accept": {"min": version, "max": version},
    }
    return [group[0] for group in server.post("/generate", body)["completions"]]


def assert_serves(server, model, version, name):
    """Greedy completions and scores are those of this model, to 1e-4."""
    for prompt, mine in zip(PROMPTS, completions(server, version, name)):
        ids, logps = greedy(model, prompt)
        assert mine["ids"] == ids
        assert mine["logps"] == pytest.approx(logps, abs=1e-4)
        assert (mine["spans"], mine["finish_reason"]) == ([[0, NEW, version]], "length")
    body = {"sequences": [{"ids": prompt} for prompt in PROMPTS if len(prompt) > 1], "top_k": 5}
    for sequence, mine in zip(body["sequences"], server.post("/score", body)["scores"]):
        rows, logps = scores(model, sequence["ids"])
        assert mine["logps"] == pytest.approx(logps.tolist(), abs=1e-4)
        for row, place in zip(rows, mine["top"]):
            assert place["logps"] == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)


def test_pushed_weights_are_those_that_answer(server):
    assert_serves(server, tiny_model(0), 0, "first")
    for version in (1, 2, 3):
        model = tiny_model(version)
        state = server.push(version, dict(model.state_dict()))
        assert state["serving_version"] == version
        assert_serves(server, model, version, "pushed")
    assert server.ask("POST", "/generate", {"prompts": [], "sampling": {}}, token="wrong")[0] == 401


def test_interrupted_updates_leave_the_version_that_serves(server):
    serving = server.get("/info")[1]["version"]
    model, rng = tiny_model(serving), random.Random(1)
    for attempt in range(5):
        server.push(serving + 1, dict(tiny_model(90 + attempt).state_dict()), stop_after=rng.randint(0, 8))
        assert_serves(server, model, serving, f"interrupted-{attempt}")
    server.post("/weights/abort", {"version": serving + 1})


def test_a_version_with_a_tensor_left_out_is_refused(server):
    serving = server.get("/info")[1]["version"]
    weights = dict(tiny_model(50).state_dict())
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(AssertionError, match=r"up_proj\.weight is missing from the manifest"):
        server.push(serving + 1, weights)
    assert_serves(server, tiny_model(serving), serving, "after-refusal")


def test_stop_ids_seeds_and_processed_log_probs(server):
    version = server.get("/info")[1]["version"]
    first = completions(server, version, "stop-a")[1]
    stopped = completions(server, version, "stop-b", stop_ids=[first["ids"][3]])[1]
    assert stopped["ids"] == first["ids"][: first["ids"].index(first["ids"][3]) + 1]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", first["ids"][3])
    body = {
        "prompts": [{"ids": [1, 5], "n": 3, "seeds": [4, 4, 5]}],
        "sampling": {"max_tokens": 20, "temperature": 0.7},
    }
    one, same, other = server.post("/generate", body)["completions"][0]
    assert one["ids"] == same["ids"] != other["ids"]
    model = tiny_model(version)
    with torch.no_grad():
        rows = (model(torch.tensor([[1, 5, *one["ids"]]])).logits[0, 1:-1] / 0.7).log_softmax(-1)
    assert one["logps"] == pytest.approx(rows.gather(1, torch.tensor(one["ids"])[:, None])[:, 0].tolist(), abs=1e-4)


def test_structured_output(server, engine):
    if engine == "native":
        pytest.importorskip("outlines_core")
    tokenizer = tiny.tokenizer()
    prompt = tokenizer.encode("abc")
    sampling = {"max_tokens": 30, "regex": "(yes|no) ok", "stop_ids": [tokenizer.eos_token_id]}
    body = {"prompts": [{"ids": prompt, "seeds": [3]}], "sampling": sampling}
    answer = server.post("/generate", body)
    assert tokenizer.decode(answer["completions"][0][0]["ids"]).startswith(("yes ok", "no ok"))
    wrong = server.ask("POST", "/generate", body | {"sampling": sampling | {"regex": "(((("}})
    assert wrong[0] == 400, wrong
    assert server.get("/ready")[0] == 200


def test_stop_strings(server):
    tokenizer = tiny.tokenizer()
    prompt = tokenizer.encode("abc")
    free = {"prompts": [{"ids": prompt}], "sampling": {"max_tokens": 40, "temperature": 0.0}}
    whole = server.post("/generate", free)["completions"][0][0]
    stop = tokenizer.decode(whole["ids"][5:6])
    cut = server.post("/generate", free | {"sampling": free["sampling"] | {"stop": [stop]}})["completions"][0][0]
    first = next(i for i, token in enumerate(whole["ids"]) if stop in tokenizer.decode([token]))
    assert cut["ids"] == whole["ids"][: first + 1]
    assert cut["finish_reason"] == "stop"


def test_killed_in_the_middle_of_an_update_a_new_process_serves_the_old_weights(start, engine):
    server = start()
    server.push(1, dict(tiny_model(1).state_dict()), stop_after=3)
    server.process.kill()
    again = start()
    assert_serves(again, tiny_model(0), 0, "killed")
    assert again.post("/shutdown", {"deadline_s": 5})["stopping"]
    assert again.process.wait(30) == 0
    assert ("CPU: linear layers multiply plainly" in again.log.read_text()) == (engine == "vllm")
    assert "a-token-of-the-tests" not in again.log.read_text()


def test_a_name_of_the_hub_is_found_in_the_cache_and_its_weights_are_put_back(start, folder, tmp_path, monkeypatch):
    """No network: the cache is laid out as huggingface_hub does it."""
    home, commit = tmp_path / "hub" / "models--some-body--some-model", "4" * 40
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    shutil.copytree(folder, home / "snapshots" / commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    server = start("--model", "some-body/some-model")
    assert not [note for note in server.get("/info")[1]["notes"] if "not at hand" in note]
    weights = dict(tiny_model(1).state_dict())
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(AssertionError, match=r"up_proj\.weight is missing from the manifest"):
        server.push(1, weights)
    assert_serves(server, tiny_model(0), 0, "hub")
    server.push(1, dict(tiny_model(1).state_dict()))
    assert_serves(server, tiny_model(1), 1, "hub")


def test_running_requests_go_on_with_new_weights_and_every_token_has_its_version(server):
    """The tokens of each span are the greedy ones of that version, keys and values of the others computed again."""
    serving = server.get("/info")[1]["version"]
    old, new = tiny_model(serving), tiny_model(serving + 1)
    manifest, payloads = update_of(serving + 1, dict(new.state_dict()), 1 << 20)
    server.post("/weights/begin", {"manifest": encode_manifest(manifest)})
    for payload in payloads:
        server.post("/weights/part", payload)
    body = {"prompts": [{"ids": [3, 4, 5]}, {"ids": [9, 8]}], "sampling": {"max_tokens": 900, "temperature": 0.0}}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/generate", body)
        time.sleep(0.4)
        server.post("/weights/commit", {"version": serving + 1, "in_flight": "continue"})
        groups = running.result(120)["completions"]
    for prompt, (mine,) in zip(body["prompts"], groups):
        assert [version for _, _, version in mine["spans"]] == [serving, serving + 1]
        ids = prompt["ids"] + mine["ids"]
        for begin, end, version in mine["spans"]:
            rows, wanted = scores(old if version == serving else new, ids)
            _, others = scores(new if version == serving else old, ids)
            place = slice(len(prompt["ids"]) - 1 + begin, len(prompt["ids"]) - 1 + end)
            rows, chosen = rows[place], wanted[place]
            assert mine["logps"][begin:end] == pytest.approx(chosen.tolist(), abs=1e-3)
            assert (chosen - others[place]).abs().mean() > 1  # under the other version they are far away
            worst = (rows.max(-1).values - chosen).max()  # two tokens may be as likely as each other, to rounding
            assert worst < 1e-3, (begin, end, int((rows.max(-1).values - chosen).argmax()), float(worst))


def test_50_damaged_payloads_against_the_live_server(server):
    serving = server.get("/info")[1]["version"]
    rng = random.Random(2)
    manifest, payloads = update_of(serving + 1, dict(tiny_model(99).state_dict()), 20_000)
    server.post("/weights/begin", {"manifest": encode_manifest(manifest)})
    for i in range(50):
        damaged = bytearray(payloads[i % len(payloads)])
        for _ in range(rng.randint(1, 5)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        status, answer = server.ask("POST", "/weights/part", damaged[: rng.choice([len(damaged), len(damaged) // 2])])
        assert status == 400, answer
        if i % 10 == 0:
            assert_serves(server, tiny_model(serving), serving, f"fuzz-{i}")
    server.post("/weights/abort", {"version": serving + 1})


def test_a_model_without_weights_serves_nothing_until_a_version_is_whole(start, engine):
    server = start("--random-weights", until="/health")
    body = {"prompts": [{"ids": [1]}], "sampling": {"max_tokens": 2}}
    assert server.ask("POST", "/generate", body)[0] == 503
    good = dict(tiny_model(1).state_dict())
    wrong = good | {"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 3)}
    refused = {  # ours knows its tensors without a file of them
        "native": r"up_proj.weight is float32 \[128, 64\]; the manifest says float32 \[3, 3\]",
        "vllm": r"The engine refused version 2 .*No version serves",
    }
    with pytest.raises(AssertionError, match=refused[engine]):
        server.push(2, wrong, bucket=1 << 20)
    assert server.ask("POST", "/generate", body)[0] == 503
    server.push(3, dict(tiny_model(3).state_dict()))
    assert_serves(server, tiny_model(3), 3, "random")


@pytest.mark.trust
@vllm_only
def test_two_worker_processes_take_new_weights_and_say_what_does_not_fit(start, monkeypatch):
    """Tensor parallel: each worker takes its share out of a block of shared memory."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two workers on one NUMA node
    server = start("--tensor-parallel", "2", "--random-weights", until="/health")
    info = server.get("/info")[1]
    assert (info["world_size"], info["capabilities"]["weights"]) == (2, True)
    wrong = dict(tiny_model(1).state_dict()) | {"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 3)}
    with pytest.raises(AssertionError, match=r"The engine refused version 1 .*No version serves"):
        server.push(1, wrong)
    for version in (1, 2, 3):
        server.push(version, dict(tiny_model(version).state_dict()))
        assert_serves(server, tiny_model(version), version, "parallel")
    server.push(4, dict(tiny_model(4).state_dict()), stop_after=3)
    assert_serves(server, tiny_model(3), 3, "interrupted")
    server.post("/weights/abort", {"version": 4})
    assert [name for name in os.listdir(default_folder()) if name.startswith("block-")] == []


@pytest.mark.trust
@vllm_only
def test_adapters_are_pushed_by_version_and_the_base_stays(start, tmp_path):
    peft = pytest.importorskip("peft")
    server = start("--adapter-folder", str(tmp_path), "--most-rank", "8")
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    assert_serves(server, tiny_model(0), 0, "base")
    for version in (1, 2):
        model = peft.get_peft_model(tiny_model(0), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(generator=torch.Generator().manual_seed(version)).mul_(0.3)
        weights = {name: tensor.clone() for name, tensor in peft.get_peft_model_state_dict(model).items()}
        fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
        fields |= {"bias": "none", "use_rslora": False, "task_type": "CAUSAL_LM"}
        server.push(version, weights, adapter_config=fields)
        assert_serves(server, model.eval(), version, "adapter")
    base = {"sequences": [{"ids": [4, 5, 6, 7]}], "base_weights": True}
    _, wanted = scores(tiny_model(0), [4, 5, 6, 7])
    assert server.post("/score", base)["scores"][0]["logps"] == pytest.approx(wanted.tolist(), abs=1e-4)
