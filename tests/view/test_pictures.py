"""Pictures of rollouts and of rows: served by their keys and numbers, and nothing else by the same way."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from posttrain.rollout.thumbnails import FOLDER, thumbnail
from posttrain.view.api import Viewed
from posttrain.view.run_folder import open_runs
from posttrain.view.server import ViewServer
from tests.tiny_vision import images
from tests.view.test_server import ask, ask_json

KEY, LINK, TEXT = "0123456789abcdef" * 2, "f" * 32, "e" * 32
PICTURE, OTHER = images((40, 60), (700, 20))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "pictures").mkdir()
    PICTURE.save(folder / "pictures" / "a.png")
    OTHER.save(folder / "b.png")
    (folder.parent / "secret.png").write_bytes((folder / "b.png").read_bytes())
    places = [{"type": "text", "text": "What?"}, {"type": "image"}, {"type": "image"}]
    inside = [{"role": "user", "content": [{"type": "image", "image": "b.png"}, {"type": "text", "text": "And?"}]}]
    rows = [
        {"images": ["pictures/a.png", "b.png"], "messages": [{"role": "user", "content": places}]},
        {"images": None, "messages": inside},
        {"images": ["../secret.png"], "messages": [{"role": "user", "content": "?"}]},
        {"images": ["https://example.com/a.png"], "messages": [{"role": "user", "content": "?"}]},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


@pytest.fixture(scope="module")
def server(run_folder, data, tmp_path_factory) -> Iterator[ViewServer]:
    folder = run_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{KEY}.webp").write_bytes(thumbnail(PICTURE))
    outside = tmp_path_factory.mktemp("outside") / "secret.webp"
    outside.write_bytes(thumbnail(OTHER))
    link = folder / f"{LINK}.webp"  # of a worker that was here before, where tests are dealt out
    link.unlink(missing_ok=True)
    link.symlink_to(outside)
    (folder / f"{TEXT}.webp").write_text("<script>alert(1)</script>")
    with ViewServer(Viewed(open_runs([str(run_folder)]), [str(data)])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(5)


def size(content: bytes) -> tuple[int, int]:
    found = Image.open(io.BytesIO(content))
    assert found.format == "WEBP"
    return found.height, found.width


def test_a_picture_is_served_by_its_key(server):
    answer, content = ask(server, f"/api/picture?run=0&key={KEY}")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "image/webp")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "no-store" in answer.headers["Cache-Control"]
    assert size(content) == (40, 60)


@pytest.mark.parametrize("token", [None, "wrong"])
def test_not_without_the_token(server, token):
    for path in (f"/api/picture?run=0&key={KEY}", "/api/data_picture?run=0&source=0&row=0&image=0"):
        answer, content = ask(server, path, token=token)
        assert answer.status == 401
        assert b"RIFF" not in content


@pytest.mark.parametrize(
    ("key", "status"),
    [
        ("", 400), ("..%2F..%2Foptions", 400), (KEY[:-1], 400), (KEY.upper(), 400), (KEY + "%0A", 400), (f"{KEY}.webp", 400),
        ("%D9%A0" * 32, 400), ("a" * 32, 404), (LINK, 404), (TEXT, 404),
    ],
)  # fmt: skip
def test_nothing_else_is_served_by_that_way(server, key, status):
    answer, content = ask(server, f"/api/picture?run=0&key={key}")
    assert answer.status == status, content
    assert answer.headers["Content-Type"] == "application/json"


def test_a_post_is_refused(server):
    assert ask(server, f"/api/picture?run=0&key={KEY}", "POST", body=b"{}")[0].status == 405


def test_images_of_rows_are_numbered_where_they_stand(server):
    rows = ask_json(server, "/api/data?run=0&source=0")["rows"]
    first, second = rows[0]["fields"], rows[1]["fields"]
    assert first["images"] == [{"type": "image", "number": 0}, {"type": "image", "number": 1}]
    assert [part.get("number") for part in first["messages"][0]["content"]] == [None, 0, 1]
    assert second["messages"][0]["content"][0] == {"type": "image", "number": 0}


@pytest.mark.parametrize(("row", "image", "expected"), [(0, 0, (40, 60)), (0, 1, (512, 15)), (1, 0, (512, 15))])
def test_and_shown_from_the_dataset_itself(server, row, image, expected):
    answer, content = ask(server, f"/api/data_picture?run=0&source=0&row={row}&image={image}")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "image/webp"), content
    assert size(content) == expected


@pytest.mark.parametrize(
    ("row", "image", "told"),
    [(2, 0, "outside of"), (3, 0, "not downloaded"), (0, 2, "has 2 images"), (9999, 0, "no such row"), (77, 0, "has 0 images")],
)  # fmt: skip
def test_no_path_of_a_row_leads_out(server, row, image, told):
    answer, content = ask(server, f"/api/data_picture?run=0&source=0&row={row}&image={image}")
    assert answer.status in (400, 404)
    assert told in json.loads(content)["error"]
