"""Merging of two models: hand-worked numbers, what must hold of any two, and merges that a run writes."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain import MergeConfig, MergeModelCallback, SFTConfig, SFTTrainer, merge_models
from posttrain.exporting import model_merging as merging
from posttrain.exporting.model_merging import MERGES, Place, write_merge
from posttrain.exporting.verification import ExportRefused
from posttrain.models.load.weight_export import exported_weights
from posttrain.trainer.checkpoints import checkpoint as files
from tests import tiny
from tests.forked import run_function
from tests.trainer.test_callbacks import sft
from tests.trainer.test_hub import ROOT, TOKEN, running_stand_in

PLACE = Place("model.layers.0.mlp.up_proj.weight", 0.0)


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def merged(method, policy, target, *base, **options):
    return MERGES[method](MergeConfig(method, **options), PLACE, policy, target, *base)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two models of one architecture."""
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        tiny.causal_lm(seed).save_pretrained(folder / str(seed))
        tiny.tokenizer().save_pretrained(folder / str(seed))
    return folder


def tensors(folder):
    return load_file(folder / "model.safetensors")


# ---- by hand -------------------------------------------------------------------------------------------------------------


def test_linear_and_slerp_by_hand():
    """(1, 0) and (0, 2) stand at a right angle: the half way of slerp is sin(45 degrees) of both, of lerp the half."""
    policy, target = numbers(1, 0), numbers(0, 2)
    assert merged("linear", policy, target).tolist() == [0.5, 1]
    weights = {"policy_model_weight": 3.0, "target_model_weight": 1.0}
    assert merged("linear", policy, target, **weights).tolist() == [0.75, 0.5]
    root = math.sqrt(0.5)
    assert merged("slerp", policy, target).tolist() == pytest.approx([root, 2 * root])
    third = math.sin(math.pi / 6), math.sin(math.pi / 3)  # t = 1 / 3: 60 and 30 degrees are left and gone
    assert merged("slerp", policy, target, t_values=1 / 3).tolist() == pytest.approx([third[1], 2 * third[0]])


def test_slerp_ends_at_both_and_takes_the_straight_line_between_parallels():
    torch.manual_seed(0)
    policy, target = torch.randn(7, 5), torch.randn(7, 5)
    assert torch.equal(merged("slerp", policy, target, t_values=0.0), policy)
    assert torch.equal(merged("slerp", policy, target, t_values=1.0), target)
    for other in (policy.clone(), policy * 3, -policy, policy + 1e-6, torch.zeros(7, 5)):
        found = merged("slerp", policy, other, t_values=0.25)
        torch.testing.assert_close(found, 0.75 * policy + 0.25 * other)


def test_ties_by_hand():
    """Differences of the target: 4, -1, 3, -2; the larger half is 4 and 3. The policy is the base, so that its own are 0."""
    policy, target = numbers(1, 1, 1, 1), numbers(5, 0, 4, -1)
    assert merged("ties", policy, target, target_model_density=0.5).tolist() == [5, 1, 4, 1]
    assert merged("ties", policy, target).tolist() == target.tolist()  # all of them, the default
    half = {"target_model_density": 0.5, "target_model_weight": 0.5}
    assert merged("ties", policy, target, **half).tolist() == [5, 1, 4, 1]  # divided by the weight of who agrees
    assert merged("ties", policy, target, normalize=0.0, **half).tolist() == [3, 1, 2.5, 1]


def test_ties_with_a_base_of_its_own_by_hand():
    """Differences from the base 0: policy 2, -1, 3, target 4, 3, -1. Signs of the sums +, +, +: the first is the mean of both,
    the second the target's alone, the third the policy's."""
    policy, target, base = numbers(2, -1, 3), numbers(4, 3, -1), numbers(0, 0, 0)
    options = {"policy_model_density": 1.0}
    assert merged("ties", policy, target, base, **options).tolist() == [3, 3, 3]
    assert merged("ties", policy, target, base, **options, policy_model_weight=3.0).tolist() == [2.5, 0, 3]


def test_dare_keeps_entries_at_random_by_its_seed_and_the_mean_stays():
    policy, target = torch.zeros(200, 200), torch.ones(200, 200)
    first = merged("dare_ties", policy, target, target_model_density=0.25)
    assert set(first.unique().tolist()) == {0.0, 4.0}
    assert first.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(first, merged("dare_ties", policy, target, target_model_density=0.25))
    assert not torch.equal(first, merged("dare_ties", policy, target, target_model_density=0.25, seed=1))
    other = MERGES["dare_ties"](
        MergeConfig("dare_ties", target_model_density=0.25), Place("lm_head.weight", 1.0), policy, target
    )
    assert not torch.equal(first, other)  # every tensor draws its own
    assert torch.equal(merged("dare_ties", policy, target, target_model_density=0.0), policy)


def test_numbers_over_depth():
    """[1, 0.7, 0.1] of five layers: 1, 0.85, 0.7, 0.4, 0.1; embeddings as the first layer, the last norm and head as the last."""
    names = ["model.embed_tokens.weight", *(f"model.layers.{i}.mlp.weight" for i in range(5)), "model.norm.weight"]
    depths = [merging._depth(name, 5) for name in names]
    assert [merging._at([1.0, 0.7, 0.1], depth) for depth in depths] == pytest.approx([1, 1, 0.85, 0.7, 0.4, 0.1, 0.1])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "mean"}, "'mean' is unknown; take one of linear, slerp, ties, dare_ties"),
        ({"t_values": 1.5}, "`t_values` is 1.5; it must lie between 0 and 1"),
        ({"target_model_density": [1.0, -0.1]}, "`target_model_density`"),
        ({"policy_model_weight": -0.5, "target_model_weight": 0.5}, "add up to 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        MergeConfig(**options)


# ---- folders ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", MERGES)
def test_a_model_merged_with_itself_is_itself_to_the_bit(saved, tmp_path, method):
    one = str(saved / "0")
    options = {"t_values": 0.5} if method == "slerp" else {}
    merge_models(MergeConfig(method, one, one, **options), tmp_path / "merged")
    for name, tensor in tensors(saved / "0").items():
        assert torch.equal(tensors(tmp_path / "merged")[name], tensor), name


def test_a_merge_is_a_model_to_load_with_its_tokenizer(saved, tmp_path):
    folder = merge_models(MergeConfig("linear", str(saved / "0"), str(saved / "1")).create(), tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(folder)
    own, other = (dict(exported_weights(tiny.causal_lm(seed))) for seed in (0, 1))
    for name, tensor in exported_weights(model):
        assert torch.equal(tensor, (0.5 * own[name] + 0.5 * other[name])), name
    assert AutoTokenizer.from_pretrained(folder).chat_template == tiny.tokenizer().chat_template
    with pytest.raises(ValueError, match="exists already; a merge is written into a new folder"):
        merge_models(MergeConfig("linear", str(saved / "0"), str(saved / "1")), folder)


def test_tied_weights_are_merged_once_and_the_dtype_is_the_policy_s(tmp_path):
    """In bfloat16, whose largest numbers float16 does not have."""
    for seed in (0, 1):
        model = tiny.causal_lm(seed, torch.bfloat16, tie_word_embeddings=True)
        with torch.no_grad():
            model.model.norm.weight[0] = 1e6
        model.save_pretrained(tmp_path / str(seed))
        tiny.tokenizer().save_pretrained(tmp_path / str(seed))
    merge_models(MergeConfig("slerp", str(tmp_path / "0"), str(tmp_path / "1")), tmp_path / "merged")
    found = tensors(tmp_path / "merged")
    assert "lm_head.weight" not in found
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert found["model.norm.weight"][0] == torch.tensor(1e6, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, found["model.embed_tokens.weight"])


def test_an_adapter_is_added_to_its_base_first(saved, tmp_path):
    torch.manual_seed(3)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(saved / "0"),
        LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False),
    )
    whole = dict(exported_weights(adapted))
    config = MergeConfig("linear", target_model_path=str(saved / "1"))
    write_merge(config, adapted, tiny.tokenizer(), tmp_path / "merged")
    other = tensors(saved / "1")
    for name, tensor in tensors(tmp_path / "merged").items():
        assert torch.equal(tensor, 0.5 * whole[name] + 0.5 * other[name]), name
    adapted.save_pretrained(tmp_path / "adapter")
    tiny.tokenizer().save_pretrained(tmp_path / "adapter")
    merge_models(MergeConfig("linear", str(tmp_path / "adapter"), str(saved / "1")), tmp_path / "from_folder")
    for name, tensor in tensors(tmp_path / "from_folder").items():
        torch.testing.assert_close(tensor, tensors(tmp_path / "merged")[name])


def test_models_that_differ_in_more_than_numbers_are_refused_by_the_tensor(saved, tmp_path):
    tiny.causal_lm(1, vocab_size=300).save_pretrained(tmp_path / "larger")
    tiny.tokenizer().save_pretrained(tmp_path / "larger")
    with pytest.raises(
        ValueError, match=r"model.embed_tokens.weight is \(259, 16\) in the policy and \(300, 16\) in the target"
    ):
        merge_models(MergeConfig("linear", str(saved / "0"), str(tmp_path / "larger")), tmp_path / "merged")
    tiny.causal_lm(1, tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    with pytest.raises(ValueError, match=r"lm_head.weight is \(259, 16\) in the policy and missing in the target"):
        merge_models(MergeConfig("linear", str(saved / "0"), str(tmp_path / "tied")), tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["larger", "tied"]  # nothing is left behind


def test_a_merge_that_is_not_loaded_as_it_was_written_is_refused(saved, tmp_path, monkeypatch):
    def wrong(folder, sums):
        sums["model.norm.weight"] = "other numbers"

    monkeypatch.setattr(merging, "check_weights", wrong)
    with pytest.raises(ExportRefused, match=r"model.norm.weight of the merge is not loaded as it was written"):
        merge_models(MergeConfig("linear", str(saved / "0"), str(saved / "1")), tmp_path / "merged")
    assert not list(tmp_path.iterdir())


# ---- in a run --------------------------------------------------------------------------------------------------------------


def test_every_checkpoint_is_merged_and_stays_whole(saved, tmp_path):
    config = MergeConfig("linear", target_model_path=str(saved / "1"))
    callback = MergeModelCallback(config, merge_at_every_checkpoint=True)
    made = sft(tmp_path, [callback], save_strategy="steps", save_steps=2)
    made.train()
    other = tensors(saved / "1")
    for step in (2, 4):
        checkpoint = tmp_path / "run" / f"checkpoint-{step}"
        own, found = tensors(checkpoint), tensors(checkpoint / "merged")
        for name, tensor in found.items():
            assert torch.equal(tensor, 0.5 * own[name] + 0.5 * other[name]), name
        files.verify(checkpoint)  # the merge is in its manifest
        assert str(checkpoint / "merged") == str(next(checkpoint.glob("merged")))
    assert sft(tmp_path, [callback], save_strategy="steps", save_steps=2, max_steps=4).train(
        resume_from_checkpoint=True
    )


def test_at_the_end_of_a_run_the_policy_is_merged_with_what_it_came_from(saved, tmp_path):
    """A run without checkpoints has the merge beside its other files. Its loss lies between those of its parents."""
    rows, shared = Dataset.from_list(tiny.chats(16)), {"report_to": "none", "alerts": False, "use_cpu": True}
    data = {"train_dataset": rows, "eval_dataset": rows, "processing_class": tiny.tokenizer()}
    args = SFTConfig(
        output_dir=str(tmp_path / "run"), max_steps=20, learning_rate=2e-2, per_device_train_batch_size=8, save_strategy="no",
        **shared,
    )  # fmt: skip
    made = SFTTrainer(str(saved / "0"), args, callbacks=[MergeModelCallback()], **data)
    before = made.evaluate()["eval_loss"]
    made.train()
    after = made.evaluate()["eval_loss"]
    args = SFTConfig(output_dir=str(tmp_path / "second"), max_steps=1, **shared)
    between = SFTTrainer(str(tmp_path / "run" / "merged"), args, **data).evaluate()["eval_loss"]
    assert after < between < before


def test_what_cannot_be_merged_is_refused_before_the_first_step(saved, tmp_path):
    with pytest.raises(ValueError, match="was not loaded from anywhere: name a target"):
        sft(tmp_path, [MergeModelCallback()]).train()
    tiny.causal_lm(1, vocab_size=300).save_pretrained(tmp_path / "larger")
    with pytest.raises(ValueError, match="only models of one architecture"):
        sft(tmp_path, [MergeModelCallback(MergeConfig(target_model_path=str(tmp_path / "larger")))]).train()
    with pytest.raises(ValueError, match="names its repository after `hub_model_id`"):
        sft(tmp_path, [MergeModelCallback(MergeConfig(target_model_path=str(saved / "1")), push_to_hub=True)]).train()


def pushing_client(folder, target):
    import socket

    connect = socket.socket.connect
    socket.socket.connect = lambda self, address: connect(self, address) if address[0] == "127.0.0.1" else 1 / 0
    callback = MergeModelCallback(MergeConfig(target_model_path=str(target)), push_to_hub=True)
    sft(folder, [callback], max_steps=1, hub_model_id="team/run", hub_token=TOKEN, hub_private_repo=True).train()


def test_a_merge_is_pushed_to_a_repository_of_its_own(saved, tmp_path):
    with running_stand_in() as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "hf")}
        environment |= {
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "PYTHONPATH": str(ROOT),
            "NO_PROXY": "127.0.0.1",
        }
        done = run_function(lambda: pushing_client(tmp_path, saved / "1"), cwd=tmp_path, environment=environment)
        assert done.returncode == 0, done.stderr[-3000:]
    assert [(wanted["name"], wanted["visibility"]) for wanted in hub.created] == [
        ("run_checkpoint-1_merged", "private")
    ]
    pushed = hub.files["team/run_checkpoint-1_merged"]
    assert pushed["model.safetensors"] == (tmp_path / "run" / "merged" / "model.safetensors").read_bytes()
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= pushed.keys()
