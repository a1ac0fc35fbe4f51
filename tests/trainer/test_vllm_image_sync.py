"""An engine that is shown other pixels than the trainer is found out; here the native engine stands for vLLM."""

from __future__ import annotations

import pytest
from PIL import ImageOps

from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.trainer.online.image_sync import ImageSync
from posttrain.trainer.vision import image_probe
from tests.methods import vllm_image_runs as runs
from tests.tiny_vision import vision_model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return runs.trainer(vision_model("llava"), tmp_path_factory.mktemp("run"), use_vllm=False)


class Inverted:
    """Pixels of pictures whose colours are turned round."""

    def __init__(self, pixels):
        self.family, self._pixels = pixels.family, pixels

    def load(self, images):
        found = self._pixels.load(images)
        pixels = self._pixels.image_processor(
            [ImageOps.invert(self._pixels.picture(one)) for one in images], return_tensors="pt"
        )
        return found | {"pixel_values": pixels["pixel_values"]}


@pytest.mark.parametrize("sees_right", [True, False])
def test_the_gap_after_an_image(run, sees_right):
    pixels = run.vision.pixels if sees_right else Inverted(run.vision.pixels)
    sync = ImageSync(image_probe(run.vision, run.renderer).one, run._write_own_logps)
    engine = NativeEngine(run.model, pixels=pixels, max_context=512)
    gap = sync.gap(engine)
    assert gap < 1e-4 if sees_right else gap > 0.05


def test_where_nothing_is_written_there_is_no_gap(run):
    sync = ImageSync(image_probe(run.vision, run.renderer).one, run._write_own_logps)
    engine = NativeEngine(run.model, pixels=run.vision.pixels, max_context=len(sync.prompts[0]))
    assert sync.gap(engine) != sync.gap(engine)  # NaN: no prompt fits
    assert sync.tokens > len(sync.prompts[0])
