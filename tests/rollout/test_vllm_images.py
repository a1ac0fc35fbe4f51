"""What vLLM is handed of a prompt with images, and what is made of its answers: all that needs no vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from posttrain.core.sample import ImageSpan
from posttrain.core.transport import ServerRefused
from posttrain.data.images.row_image import RowImage
from posttrain.data.render.renderer import Conversation
from posttrain.data.vision.families import vision_family
from posttrain.rollout.engines.protocol import ERROR, WROTE_PLACEHOLDER, Prompt, SamplingParams, generate
from posttrain.rollout.engines.vllm.pictures import Pictures, placeholder_in
from posttrain.rollout.engines.vllm.server_engine import ServedOptions, ServedVLLM
from posttrain.rollout.engines.vllm.upstream import UpstreamClient
from posttrain.serve.engine.random_weights import _keeping_buffers
from posttrain.serve.engine.shown_images import ShownImage, ShownImages
from posttrain.serve.engine.tower_names import as_vllm_names
from tests.data.vision_rows import renderer
from tests.rollout.served import QUICK, echo_process, needs_uvicorn
from tests.tiny_vision import images, tiny_processor
from tests.vision_samples import RAGGED_FAMILIES
from tests.waiting import eventually

SIZES = ((60, 40), (30, 90), (200, 120))


class Album:
    """Opens what it was given, and counts."""

    def __init__(self, *pictures: Image.Image, family: str = "llava") -> None:
        self.family = vision_family(family, tiny_processor(family))
        self.pictures = {bytes([number]) * 16: picture for number, picture in enumerate(pictures)}
        self.opened: list[bytes] = []

    def picture(self, image: ImageSpan) -> Image.Image:
        self.opened.append(image.key)
        return self.pictures[image.key]

    def prompt(self, *numbers: int, key: int = 0) -> Prompt:
        """Four tokens for each image, between single ones."""
        keys = list(self.pictures)
        ids = [1] + [self.family.placeholder_id, *[self.family.placeholder_id] * 3, 2] * len(numbers)
        spans = [ImageSpan(1 + 5 * i, 5 + 5 * i, keys[n], (3, 5), (1,)) for i, n in enumerate(numbers)]
        return Prompt(ids, key, images=tuple(spans))


@pytest.mark.parametrize("family", RAGGED_FAMILIES)
def test_the_collapsed_prompt_is_what_the_template_wrote(family):
    """Expanded ids would be expanded again. The comparison is with the tokens of the template's own text."""
    rendered = renderer(family)
    pictures = [RowImage(bytes([number]) * 16, size) for number, size in enumerate(SIZES)]
    parts = [{"type": "text", "text": "Look: "}, *({"type": "image", "image": one} for one in pictures[:2])]
    parts += [{"type": "text", "text": " and "}, {"type": "image", "image": pictures[2]}, {"type": "text", "text": "?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "A"}]}]
    (sample,) = rendered.encode_chats([Conversation(turns, num_prompt_messages=1)], "completion")
    bare = [
        {**turn, "content": [{k: v for k, v in part.items() if k != "image"} for part in turn["content"]]}
        for turn in turns
    ]
    text = rendered.layouts.processor.apply_chat_template(bare)
    family_facts = rendered.layouts.family
    shown = ShownImages(
        tuple(ShownImage(i.key.hex(), i.start, i.stop, None) for i in sample.images), (family_facts.written_id,)
    )
    collapsed = shown.collapsed(sample.input_ids.tolist())
    assert collapsed == rendered.tokenizer(text, add_special_tokens=False)["input_ids"][: len(collapsed)]
    assert collapsed.count(family_facts.written_id) == 3 < len(sample.input_ids) - len(collapsed)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=5), st.integers(0, 3))
def test_collapsing_keeps_what_is_around_images(parts, tail):
    ids, spans, wanted = [], [], []
    for before, size in parts:
        text = list(range(100, 100 + before))
        spans.append(ShownImage("k", len(ids) + before, len(ids) + before + size, None))
        ids += text + [9] * size
        wanted += [*text, 7, 8]
    ids, wanted = ids + [5] * tail, wanted + [5] * tail
    assert ShownImages(tuple(spans), (7, 8)).collapsed(ids) == wanted


def test_images_are_known_to_vllm_by_key_and_options():
    (picture,) = images((3, 5))

    def known_as(key, options):
        prompt = ShownImages((ShownImage(key, 0, 1, picture),), (7,), options).vllm_prompt([9])
        assert prompt["multi_modal_data"] == {"image": [picture]}
        assert prompt.get("mm_processor_kwargs", {}) == options
        return prompt["multi_modal_uuids"]["image"][0]

    options = [{}, {"size": {"longest_edge": 4}}, {"size": {"longest_edge": 8}}]
    names = {known_as(key, one) for key in ("a", "b") for one in options}
    assert len(names) == 6
    assert known_as("a", {}) == known_as("a", {})


@pytest.mark.parametrize(("returned", "place"), [([1, 2, 2, 3], 3), ([1, 2, 2], 3), ([4, 2, 2, 2, 3], 0)])
def test_other_tokens_than_ours_are_said_with_both_counts_and_the_size(returned, place):
    (picture,) = images((3, 5))
    shown = ShownImages((ShownImage("k", 1, 4, picture),), (2,))
    assert shown.difference([1, 2, 2, 2, 3], [1, 2, 2, 2, 3]) is None
    sentence = shown.difference([1, 2, 2, 2, 3], returned)
    assert f"makes {len(returned)} tokens of a prompt that has 5 tokens" in sentence
    assert f"from token {place} on" in sentence
    assert "3 x 5" in sentence


def test_a_picture_of_a_group_is_opened_once_and_found_again_by_its_pixels():
    album = Album(*images((3, 5), (3, 5)))
    pictures = Pictures(album, {"a": 1})
    for _ in range(4):
        shown = pictures.shown(album.prompt(0, 1))
        sent = pictures.sent(album.prompt(1, 1))
    assert len(album.opened) == 2
    assert [image.picture for image in shown.images] == list(album.pictures.values())
    assert (shown.mark, shown.options) == ((album.family.written_id,), {"a": 1})
    assert len(sent.keys) == 1
    assert sent.entries == [{"key": sent.keys[0], "start": start, "stop": start + 4} for start in (1, 6)]
    assert pictures.shown(Prompt([1])) is None
    assert pictures.sent(Prompt([1])) is None


@pytest.mark.parametrize(("ids", "place"), [([1, 2], None), ([], None), ([7, 1], 0), ([1, 8, 7], 1)])
def test_the_first_placeholder_of_a_completion(ids, place):
    assert placeholder_in(ids, frozenset({7, 8})) == place


@pytest.mark.parametrize(
    ("theirs", "given", "wanted"),
    [
        ("vision_tower.vision_model.a", "vision_tower.a", "vision_tower.vision_model.a"),
        ("vision_tower.vision_model.a", "model.vision_tower.a", "model.vision_tower.vision_model.a"),
        ("vision_tower.vision_model.a", "vision_tower.vision_model.a", "vision_tower.vision_model.a"),
        ("vision_tower.vision_model.a", "language_model.a", "language_model.a"),
        ("vision_tower.a", "vision_tower.a", "vision_tower.a"),
    ],
)
def test_tensors_of_a_tower_are_named_as_vllm_has_them(theirs, given, wanted):
    model = SimpleNamespace(named_parameters=lambda: [(theirs, None)])
    assert list(as_vllm_names(model, [(given, 1)])) == [(wanted, 1)]


def test_random_weights_leave_buffers_alone():
    """vLLM's loader of random numbers writes into all that a state dict has."""
    model = torch.nn.BatchNorm1d(3)
    model.running_mean.fill_(5)

    def fill(self, model, config):
        for tensor in model.state_dict().values():
            tensor.fill_(9)

    _keeping_buffers(fill)(None, model, config=None)
    assert model.running_mean.tolist() == [5] * 3
    assert model.weight.tolist() == [9] * 3


# ---- servers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path):
    """Makes engines over a server process that is shown up to two images, and closes them."""
    made = []

    def make(album, **options):
        arguments = json.dumps({"images": 2, **options})
        process = echo_process(tmp_path, "--images", "2", "--engine-args", arguments)
        pictures = None if album is None else Pictures(album, {"size": {"longest_edge": 8}})
        made.append(ServedVLLM([process], options=ServedOptions(QUICK, watch_seconds=0.3), pictures=pictures))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@needs_uvicorn
def test_images_are_sent_once_and_again_where_the_server_has_dropped_them(served):
    album = Album(*images((3, 5), (3, 5), (6, 4)))
    engine = served(album)
    client = engine.fleet.members[0].client
    sent = []
    ask = client._transport.ask
    client._transport.ask = lambda method, path, *more: (
        sent.append(path) if method == "PUT" else None,
        ask(method, path, *more),
    )[1]
    asked = [album.prompt(0, 1, key=key) for key in range(8)] + [Prompt([1, 2], key=9), album.prompt(2, key=10)]
    params = SamplingParams(max_tokens=4)
    assert [done.error for done in generate(engine, asked, params)] == [None] * 10
    assert len(sent) == len(set(sent)) == 3
    # It is started again, without images, and this client believes they are there.
    client._post("/shutdown", {"deadline_s": 0.0}, 5)
    eventually(lambda: engine.fleet.recoveries)
    assert [done.error for done in generate(engine, asked, params)] == [None] * 10
    assert len(sent) == 6
    assert len(album.opened) == 3


@needs_uvicorn
def test_a_prompt_that_becomes_another_one_there_ends_the_run(served):
    album = Album(*images((3, 5)))
    engine = served(album, expands_to=11)
    with pytest.raises(ServerRefused, match=r"makes 11 tokens of a prompt that has 6 tokens.*3 x 5") as refused:
        generate(engine, [album.prompt(0)], SamplingParams(max_tokens=4))
    assert refused.value.status == 422


@needs_uvicorn
def test_a_completion_that_writes_a_placeholder_ends_before_it(served):
    album = Album(*images((3, 5)))
    engine = served(album)
    engine.load_weights([(name, torch.full((4,), float(v))) for name, v in zip("abcd", (3, 4, 0, 6))], 1)
    engine.forbidden = frozenset({0})
    (done,) = generate(engine, [album.prompt(0)], SamplingParams(max_tokens=4))
    assert (done.ids.tolist(), done.finish_reason, len(done.policy_logps)) == ([3, 4], ERROR, 2)
    assert done.error.startswith(WROTE_PLACEHOLDER)


@needs_uvicorn
def test_an_engine_without_pictures_reads_texts_only(served):
    engine = served(None)
    found = generate(engine, [Album(*images((3, 5))).prompt(0), Prompt([1])], SamplingParams(max_tokens=2))
    assert ["reads texts only" in (done.error or "") for done in found] == [True, False]


def test_a_plain_vllm_serve_is_shown_no_images():
    client = UpstreamClient("http://127.0.0.1:1")
    info = SimpleNamespace(images=0)
    assert "posttrain vllm-serve --images 3" in client.why_no_images(info, 3)


def test_prompts_say_their_images_by_one_name():
    prompt = replace(Prompt([1, 2]), images=(ImageSpan(0, 1, bytes(16), (8, 8), (1,)),))
    assert not hasattr(prompt, "media")
    assert np.array_equal(prompt.ids, [1, 2])
