"""A teacher on a server is sent token ids: rows with images are refused before anything is loaded or asked."""

from __future__ import annotations

import pytest

from tests.trainer.vision_runs import PICTURES, question, trainer_of


@pytest.mark.parametrize(("method", "served"), [("server_distillation", {}), ("iw_opd", {"use_teacher_server": True})])
def test_images_are_refused_where_the_teacher_is_on_a_server(method, served, tmp_path):
    rows = [{"prompt": [question("What is it?", picture)]} for picture in PICTURES]
    with pytest.raises(ValueError, match="a teacher on a server is sent token ids only"):
        trainer_of(
            method, "llava", tmp_path, train_dataset=rows, teacher_model_server_url="http://127.0.0.1:9", **served
        )
