"""Divergences of a student from a teacher, chunk by chunk, against float64 autograd on the full logits of both."""

from __future__ import annotations

import types
import weakref
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model

from posttrain.core.batch import PADDED, RAGGED
from posttrain.data.collate import collate
from posttrain.losses.distributions import BOTH, SORTED_L1, STUDENT, Divergence
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring.fused_divergence import Taught
from posttrain.models.scoring.fused_head import Reader
from posttrain.models.scoring.token_scores import Measure, likeliest_tokens, logps_of_tokens, score_tokens
from posttrain.models.scoring.two_heads import score_divergence, teacher_rows
from posttrain.models.sharding import reshard, whole
from tests import tiny
from tests.forked import start_group, wait_for_group
from tests.models.test_token_scores import FAMILIES, full_logits, samples

DIVERGENCES = {
    "forward": Divergence(0),
    "reverse": Divergence(1),
    "jsd": Divergence(0.3),
    "skew_forward": Divergence(kind="skew_forward"),
    "skew_reverse": Divergence(kind="skew_reverse"),
    "top-k": Divergence(0, top_k=5, tail=True),
    "top-k-student": Divergence(0.5, top_k=5, top_k_of=STUDENT),
    "top-k-both": Divergence(1, top_k=5, top_k_of=BOTH, tail=True),
    "sorted_l1": Divergence(kind=SORTED_L1),
}
NEAR = {"rtol": 1e-9, "atol": 1e-9}


def model_of(family: str, seed: int, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    for module in model.modules():
        if type(module).__name__.endswith("Norm"):  # transformers' round to float32
            module.forward = types.MethodType(exact_norm, module)
    return model.to(dtype)


def exact_norm(self, hidden):
    return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)


def expected(student, teacher, divergence, temperatures=(1.0, 1.0), vocabulary=None):
    """(divergences, log-probs, weights of tokens, gradients by name) from whole logits, by autograd."""
    ours, targets = full_logits(student, temperatures[0])
    theirs = full_logits(teacher, temperatures[1])[0].detach()
    ours, theirs = (logits[:, :vocabulary].log_softmax(-1) for logits in (ours, theirs))
    values = divergence(ours, theirs)
    factors = torch.linspace(0.5, -1, len(values), dtype=torch.float64)
    gradients = gradients_of(student, values, factors)
    return values.detach(), ours.gather(-1, targets[:, None])[:, 0].detach(), factors, gradients


def gradients_of(model, values, factors):
    model.zero_grad()
    (values * factors).sum().backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def batch_for(*models, layout=RAGGED):
    """Padded where one of the models needs it."""
    layouts = [layout, *(load_model(model, LoadOptions()).layout for model in models)]
    return collate(samples(), ("text",), PADDED if PADDED in layouts else RAGGED)


def found_by(student, teacher, divergence, layout=RAGGED, temperatures=(1.0, 1.0), **how):
    batch = batch_for(student, teacher, layout=layout)
    rows = teacher_rows(teacher, batch, temperatures[1])
    return score_divergence(student, batch, rows, divergence, temperature=temperatures[0], **how)


def assert_equal(student, scores, right):
    values, logps, factors, gradients = right
    torch.testing.assert_close(scores.divergences, values, **NEAR)
    torch.testing.assert_close(scores.logps, logps, **NEAR)
    found = gradients_of(student, scores.divergences, factors)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, **NEAR, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_values_and_gradients_are_those_of_full_logits(name, chunk):
    student, teacher = model_of("qwen2", 0), model_of("qwen2", 1)
    right = expected(student, teacher, DIVERGENCES[name])
    assert_equal(student, found_by(student, teacher, DIVERGENCES[name], chunk_tokens=chunk), right)


@pytest.mark.parametrize("layout", [RAGGED, PADDED])
@pytest.mark.parametrize(
    "families",
    [("gemma2-softcap", "cohere-scale"), ("granite-scale", "gemma2-softcap"), ("cohere-scale", "granite-scale")],
    ids="-".join,
)
@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_each_head_has_its_own_softcap_scale_and_temperature(families, beta, layout):
    student, teacher = (model_of(family, seed) for seed, family in enumerate(families))
    right = expected(student, teacher, Divergence(beta), (0.7, 1.3))
    scores = found_by(student, teacher, Divergence(beta), layout, (0.7, 1.3), chunk_tokens=5)
    assert_equal(student, scores, right)


@pytest.mark.parametrize("family", ["qwen2", "gemma2-softcap"])
@pytest.mark.parametrize("name", ["forward", "reverse", "jsd", "skew_forward", "skew_reverse"])
def test_a_teacher_that_is_the_student_has_no_divergence_and_no_gradient(family, name):
    student = model_of(family, 0)
    scores = found_by(student, student, DIVERGENCES[name], chunk_tokens=7)
    assert scores.divergences.abs().max() < 1e-12
    gradients = gradients_of(student, scores.divergences, torch.ones_like(scores.divergences))
    assert max(gradient.abs().max() for gradient in gradients.values()) < 1e-12


@pytest.mark.parametrize("beta", [0, 0.3, 1])
@pytest.mark.parametrize("words", [259, 250])
def test_words_beyond_the_shared_vocabulary_are_in_no_normaliser(beta, words):
    """The teacher has three words more; with 250 both have some that do not count. Statistics are of the same words."""
    student, teacher = (
        tiny.with_exact_norms(tiny.causal_lm(0, torch.float64)),
        tiny.causal_lm(1, torch.float64, vocab_size=262),
    )
    right = expected(student, teacher, Divergence(beta), vocabulary=words)
    with torch.no_grad():
        logps = full_logits(student)[0][:, :words].log_softmax(-1)
    scores = found_by(student, teacher, Divergence(beta), vocabulary=words, stats=("entropy",), chunk_tokens=7)
    torch.testing.assert_close(scores.stats["entropy"], -(logps.exp() * logps).sum(-1), **NEAR)
    assert_equal(student, scores, right)


def test_log_probs_alone_can_leave_words_out():
    student = model_of("llama", 0)
    logits, targets = full_logits(student)
    right = logits[:, :250].log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    factors = torch.linspace(0.5, -1, len(right), dtype=torch.float64)
    gradients = gradients_of(student, right, factors)
    load_model(student, LoadOptions())
    scores = score_tokens(student, collate(samples(), ("text",)), vocabulary=250, chunk_tokens=7)
    torch.testing.assert_close(scores.logps, right, **NEAR)
    for name, gradient in gradients_of(student, scores.logps, factors).items():
        torch.testing.assert_close(gradient, gradients[name], **NEAR)


def test_vocabularies_of_two_sizes_are_compared_sorted():
    student, teacher = (
        tiny.with_exact_norms(tiny.causal_lm(0, torch.float64)),
        tiny.causal_lm(1, torch.float64, vocab_size=301),
    )
    right = expected(student, teacher, Divergence(kind=SORTED_L1))
    assert_equal(student, found_by(student, teacher, Divergence(kind=SORTED_L1), chunk_tokens=7), right)


def test_sizes_that_differ_are_refused_unless_named():
    student, teacher = tiny.causal_lm(0), tiny.causal_lm(1, vocab_size=262)
    with pytest.raises(ValueError, match="The student has 259 words and the teacher 262"):
        found_by(student, teacher, Divergence())
    with pytest.raises(ValueError, match="vocabulary is 260, and the student's head has 259 words"):
        found_by(student, teacher, Divergence(), vocabulary=260)


def test_a_teacher_that_was_asked_about_other_tokens_is_refused():
    student, teacher = tiny.causal_lm(0), tiny.causal_lm(1)
    for model in (student, teacher):
        load_model(model, LoadOptions())
    rows = teacher_rows(teacher, collate(samples()[:2], ("text",)))
    with pytest.raises(ValueError, match="must have been asked about the same ones"):
        score_divergence(student, collate(samples(), ("text",)), rows, Divergence())


@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_adapters_on_the_heads_count(beta):
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
        models.append(get_peft_model(model_of("llama", seed), config).double().eval())
    right = expected(*models, Divergence(beta))
    assert any("lm_head.lora_A" in name for name in right[3])
    assert_equal(models[0], found_by(*models, Divergence(beta), chunk_tokens=7), right)


@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_bfloat16_models_are_near_float64(beta):
    """Logits of heads in bfloat16 are rounded to 1 part in 256; everything after them is in float32."""
    student, teacher = model_of("qwen2", 0, torch.bfloat16), model_of("qwen2", 1, torch.bfloat16)
    for model in (student, teacher):
        load_model(model, LoadOptions(dtype=torch.bfloat16))
    batch = collate(samples(), ("text",))
    rows = teacher_rows(teacher, batch)
    scores = score_divergence(student, batch, rows, Divergence(beta), chunk_tokens=7)
    assert rows.hidden.dtype is torch.bfloat16
    assert scores.divergences.dtype is torch.float32
    ours = teacher_rows(student, batch).hidden
    exact = [head.double() for head in (ours, rows.hidden)]
    weights = [model.get_output_embeddings().weight.detach().double() for model in (student, teacher)]
    logps = [(hidden @ weight.T).log_softmax(-1) for hidden, weight in zip(exact, weights)]
    torch.testing.assert_close(scores.divergences.double(), Divergence(beta)(*logps), rtol=0.02, atol=0.01)
    scores.divergences.sum().backward()
    assert all(one.grad.isfinite().all() for one in student.parameters())


def test_an_empty_batch_has_no_divergences_and_still_a_graph():
    student, teacher = tiny.causal_lm(0), tiny.causal_lm(1)
    for model in (student, teacher):
        load_model(model, LoadOptions())
    batch = collate([], ("text",))
    scores = score_divergence(student, batch, teacher_rows(teacher, batch), Divergence())
    assert scores.divergences.shape == batch.targets.shape
    scores.divergences.sum().backward()


# ---- fused heads ---------------------------------------------------------------------------------------------------------

LOSSES = {
    "sum": ({}, lambda d, lp, w: d.sum()),
    "scaled": ({}, lambda d, lp, w: 3 * d.sum() / 7),
    "materialised": ({}, lambda d, lp, w: (d * torch.full_like(d, 0.3)).sum()),
    "weighted": ({"weights": True}, lambda d, lp, w: 0.5 * (d * w).sum()),
    "weights-and-other-loss": ({"weights": True}, lambda d, lp, w: d.square().sum()),
    "any": ({}, lambda d, lp, w: (d * w).sum() + d.square().sum()),
    "with-logps": ({}, lambda d, lp, w: (d * w).sum() - lp.sum()),
    "logps-said": ({"logps_in_loss": True}, lambda d, lp, w: d.sum() - (w * lp).sum()),
    "logps-alone": ({}, lambda d, lp, w: -(w * lp).sum()),
}


class Products:
    """Counts the rows of logits that each head has computed."""

    def __init__(self, monkeypatch):
        self.students, self.teachers = 0, 0
        ours, theirs = Reader.logits, Taught.logits

        def student(reader, part):
            self.students += len(reader.hidden[part])
            return ours(reader, part)

        def teacher(taught, part):
            self.teachers += len(taught.hidden[part])
            return theirs(taught, part)

        monkeypatch.setattr(Reader, "logits", student)
        monkeypatch.setattr(Taught, "logits", teacher)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["forward", "reverse", "jsd", "skew_forward", "skew_reverse"])
def test_any_loss_has_its_exact_gradient_and_logits_are_computed_once_where_weights_are_known(name, loss, monkeypatch):
    student, teacher = model_of("qwen2", 0), model_of("qwen2", 1)
    options, function = LOSSES[loss]
    ours, targets = full_logits(student, 0.7)
    logps = ours.log_softmax(-1)
    right = DIVERGENCES[name](logps, full_logits(teacher)[0].detach().log_softmax(-1))
    weights = torch.linspace(-1, 2, len(right), dtype=torch.float64)
    student.zero_grad()
    function(right, logps.gather(-1, targets[:, None])[:, 0], weights).backward()
    gradients = {name: one.grad.clone() for name, one in student.named_parameters()}

    batch = batch_for(student, teacher)
    rows = teacher_rows(teacher, batch)
    products = Products(monkeypatch)
    given = {**options, "weights": weights} if "weights" in options else options
    scores = score_divergence(student, batch, rows, DIVERGENCES[name], temperature=0.7, chunk_tokens=5, **given)
    total = function(scores.divergences, scores.logps, weights)
    is_known = loss in ("sum", "scaled", "materialised", "weighted")
    assert (products.students, products.teachers) == (16, 16)
    for times in (1, 2) if is_known else (2, 3):  # the second backward of a graph computes them again
        student.zero_grad()
        total.backward(retain_graph=True)
        assert (products.students, products.teachers) == (16 * times, 16 * times)
        for name, parameter in student.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], **NEAR)


def test_nothing_of_the_size_of_logits_is_saved_and_one_chunk_of_each_is_alive(monkeypatch):
    student, teacher = tiny.causal_lm(0), tiny.causal_lm(1)
    alive, most, largest = weakref.WeakSet(), [0], [0]

    def counted(real):
        def logits(self, part):
            found = real(self, part)
            alive.add(found)
            most[0] = max(most[0], len(alive))
            return found

        return logits

    def pack(tensor):
        if tensor.dim() == 2 and tensor.shape[-1] == 259 and not isinstance(tensor, torch.nn.Parameter):
            largest[0] = max(largest[0], len(tensor))
        return tensor

    for kind in (Reader, Taught):
        monkeypatch.setattr(kind, "logits", counted(kind.logits))
    for divergence in (Divergence(0.5), Divergence(0.5, top_k=5)):  # fused, and the plain path
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            scores = found_by(student, teacher, divergence, chunk_tokens=4)
        scores.divergences.square().sum().backward()
    assert (most[0], largest[0]) == (2, 0)


def test_a_finished_backward_leaves_nothing_behind():
    """A tensor that the graph hands out must not be held by it: what it points to would never be freed."""
    student, teacher = tiny.causal_lm(0), tiny.causal_lm(1)
    scores = found_by(student, teacher, Divergence(0.5))
    watched = weakref.ref(scores.divergences.grad_fn)
    scores.divergences.sum().backward()
    del scores
    assert watched() is None


@pytest.mark.parametrize("frozen", ["head", "body"])
def test_only_what_is_trained_gets_a_gradient(frozen):
    student, teacher = model_of("llama", 0), model_of("llama", 1)
    (student.lm_head if frozen == "head" else student.model).requires_grad_(False)
    right = expected(student, teacher, Divergence(0.3))
    assert_equal(student, found_by(student, teacher, Divergence(0.3), chunk_tokens=5), right)


def test_evaluation_needs_no_gradient():
    student, teacher = model_of("qwen2", 0), model_of("qwen2", 1)
    right = expected(student, teacher, Divergence(0.3))[0]
    with torch.no_grad():
        scores = found_by(student, teacher, Divergence(0.3), chunk_tokens=5)
    torch.testing.assert_close(scores.divergences, right, **NEAR)
    assert not scores.divergences.requires_grad


# ---- candidates ----------------------------------------------------------------------------------------------------------


def test_the_likeliest_tokens_of_a_teacher_and_what_the_student_says_about_them():
    student, teacher = model_of("llama", 0), model_of("gemma2-softcap", 1)
    theirs, targets = full_logits(teacher, 0.7)
    best = theirs.log_softmax(-1).topk(4, -1)
    ours = full_logits(student)[0].log_softmax(-1).gather(-1, best.indices)
    factors = torch.linspace(-1, 1, ours.numel(), dtype=torch.float64).view_as(ours)
    gradients = gradients_of(student, ours, factors)
    batch = batch_for(student, teacher)
    measures = {"likeliest": Measure(partial(likeliest_tokens, count=4), (batch.targets,))}
    with torch.no_grad():
        scores = score_tokens(teacher, batch, measures=measures, temperature=0.7, chunk_tokens=7)
    ids, logps = scores.stats["likeliest"].split(4, -1)
    ids = ids.long()
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(logps.double(), best.values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scores.logps, theirs.log_softmax(-1).gather(-1, targets[:, None])[:, 0], **NEAR)
    measures = {"candidates": Measure(logps_of_tokens, (ids,), differentiable=True)}
    found = score_tokens(student, batch, measures=measures, chunk_tokens=7).stats["candidates"]
    torch.testing.assert_close(found, ours, **NEAR)
    for name, gradient in gradients_of(student, found, factors).items():
        torch.testing.assert_close(gradient, gradients[name], **NEAR)


# ---- sharded heads -------------------------------------------------------------------------------------------------------


def shard(model, tied_to_root):
    """As accelerate does: each layer, then the last norm with the head; or the head in the outermost group."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    if not tied_to_root:
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    return fully_shard(model, reshard_after_forward=True)


def sharded_gradients(rank, folder, divergence, family, tied_to_root, is_own_teacher):
    """Two passes each: the first process has three samples and the second one; the teacher is resharded in between."""
    torch.distributed.init_process_group("gloo")
    student = shard(model_of(family, 0), tied_to_root)
    teacher = student if is_own_teacher else shard(model_of(family, 1), tied_to_root)
    for model in (student, teacher):
        load_model(model, LoadOptions())
    own = samples()[:3] if rank == 0 else samples()[3:]
    for number in range(2):
        student.zero_grad()
        batch = collate(own, ("text",), PADDED)
        scores = score_divergence(student, batch, teacher_rows(teacher, batch, 1.3), divergence, chunk_tokens=3)
        factors = torch.linspace(0.5, -1, 16, dtype=torch.float64)
        factors = factors[: batch.num_trained] if rank == 0 else factors[-batch.num_trained :]
        (scores.divergences * factors).sum().backward()
        found = {name: whole(one.grad) * 2 for name, one in student.named_parameters()}  # a mean over two processes
        if rank == 0:
            torch.save(found, folder / f"{number}.pt")
        reshard(teacher)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "family", "tied_to_root", "is_own_teacher"),
    [
        ("jsd", "llama", False, False),
        ("jsd", "llama", True, False),
        ("jsd", "llama", False, True),
        ("top-k", "llama", False, False),  # the plain path, whose backward calls both heads again
        ("jsd", "gemma2-softcap", True, False),
    ],
)
def test_sharded_heads_of_both_give_the_gradient_of_whole_ones(name, family, tied_to_root, is_own_teacher, tmp_path):
    student, teacher = model_of(family, 0), model_of(family, 0 if is_own_teacher else 1)
    gradients = expected(student, teacher, DIVERGENCES[name], (1.0, 1.3))[3]
    how = tmp_path, DIVERGENCES[name], family, tied_to_root, is_own_teacher
    group = start_group(2, lambda rank: sharded_gradients(rank, *how), tmp_path / "rank")
    assert wait_for_group(group) == [0, 0], (tmp_path / "rank-0.log").read_text()[-3000:]
    for number in range(2):
        found = torch.load(tmp_path / f"{number}.pt")
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, **NEAR, msg=lambda text, name=name: f"{name}: {text}")
