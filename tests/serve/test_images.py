"""Images over the wire: only what was sent, is what it says, and is still there is shown; everything else is refused in words."""

from __future__ import annotations

import asyncio
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from posttrain.serve.errors import PayloadError
from posttrain.serve.recent import Recent
from posttrain.serve.server import ServerOptions
from posttrain.serve.wire.images import check_image, decode_image, encode_image, image_key
from tests.serve.served_app import asked

MARK = 77


def picture(height=3, width=5, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def prompt(*keys, **more):
    """Two tokens for each image, between single ones."""
    ids = [1] + [5, 5, 1] * len(keys)
    return {
        "ids": ids,
        "images": [{"key": key, "start": 1 + 3 * i, "stop": 3 + 3 * i} for i, key in enumerate(keys)],
    } | more


def request(*prompts, **more):
    return asked(prompts=list(prompts), image_mark=[MARK], **more)


@given(st.integers(1, 40), st.integers(1, 40))
def test_pixels_travel_as_they_are(height, width):
    sent = picture(height, width)
    data = encode_image(sent)
    assert np.array_equal(np.asarray(decode_image(data)), np.asarray(sent))
    assert decode_image(data).size == sent.size


@pytest.mark.parametrize(
    "data",
    [b"", b"1234567", struct.pack(">II", 1, 1), struct.pack(">II", 0, 4), struct.pack(">II", 2, 1) + bytes(7)]
    + [struct.pack(">II", 1 << 31, 1 << 31) + bytes(12)],
)
def test_what_is_no_image_is_refused(data):
    with pytest.raises(PayloadError, match="An image"):
        check_image(data)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30))), st.integers(1, 60), st.integers(1, 5))
def test_the_least_recently_used_make_room(entries, most_bytes, most_entries):
    kept = Recent(most_bytes, most_entries)
    for key, size in entries:
        kept.put(key, str(key), size)
        assert kept.num_bytes <= most_bytes
        assert len(kept) <= most_entries
        assert kept.get(key) == (str(key) if size <= most_bytes else None)
    kept.forget(range(10))
    assert (len(kept), kept.num_bytes) == (0, 0)


def test_what_was_used_last_stays():
    kept = Recent(100, 2)
    for key in "ab":
        kept.put(key, key, 1)
    kept.get("a")
    kept.put("c", "c", 1)
    assert [kept.get(key) for key in "abc"] == ["a", None, "c"]


def test_a_prompt_is_shown_images_that_were_sent_before(served):
    one = served(images=2)
    first, second = (encode_image(picture(seed=seed)) for seed in range(2))

    async def go():
        for data in (first, second, first):
            assert (await one("PUT", f"/images/{image_key(data)}", data)).status == 200
        keys = [image_key(data) for data in (second, first)]
        return await one(
            "POST", "/generate", request(prompt(*keys), prompt(), prompt(keys[0]), image_options={"a": {"b": 1}})
        )

    reply = asyncio.run(go())
    assert reply.status == 200, reply.body
    assert one.engine.shown == [[1, MARK, 1, MARK, 1], [1, MARK, 1]]  # collapsed: each image as its mark
    assert len(one.server.images) == 2
    assert asyncio.run(one("GET", "/info")).json()["images"] == 2


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"images": [{"key": "http://example.com/a.png", "start": 0, "stop": 1}]}, 400, "`key` of entry 0 of `images`"),
        ({"images": [{"url": "http://example.com/a.png"}]}, 400, "`images`"),
        ({"images": ["data:image/png;base64,AAAA"]}, 400, "`images`"),
        ({"multi_modal_data": {"image": "/etc/passwd"}}, 400, "`multi_modal_data` is not a field"),
        ({"ids": [1, 5, 5]}, 400, "do not lie one after the other in its 3 tokens"),
    ],
)
def test_nothing_but_names_of_images_that_were_sent(served, change, status, words):
    one, data = served(images=2), encode_image(picture())
    asyncio.run(one("PUT", f"/images/{image_key(data)}", data))
    whole = prompt(image_key(data), image_key(data))
    reply = asyncio.run(one("POST", "/generate", request(whole | change)))
    assert (reply.status, words in reply.json()["error"]) == (status, True), reply.body
    assert not one.engine.shown


def test_an_image_that_is_not_there_is_a_conflict_that_says_so(served):
    options = ServerOptions(most_images=1)
    one = served(images=3, options=options)
    first, second = (encode_image(picture(seed=seed)) for seed in range(2))

    async def go():
        for data in (first, second):  # the second pushes the first out
            await one("PUT", f"/images/{image_key(data)}", data)
        gone = await one("POST", "/generate", request(prompt(image_key(first))))
        await one("PUT", f"/images/{image_key(first)}", first)
        return gone, await one("POST", "/generate", request(prompt(image_key(first))))  # under the same request id

    gone, again = asyncio.run(go())
    assert (gone.status, gone.json()["kind"], again.status) == (409, "ImagesMissing", 200)
    assert image_key(first) in gone.json()["error"]


@pytest.mark.parametrize(
    ("images", "key", "body", "status", "words"),
    [
        (0, None, b"small", 400, "start it with --images N"),
        (1, "0" * 64, None, 400, "and not the key in the path"),
        (1, None, b"no image", 400, "An image of"),
        (1, None, bytes(1 << 17), 413, "at most"),
    ],
)
def test_an_image_is_refused(served, images, key, body, status, words):
    one = served(images=images)
    body = encode_image(picture()) if body is None else body
    reply = asyncio.run(one("PUT", f"/images/{key or image_key(body)}", body))
    assert (reply.status, words in reply.json()["error"]) == (status, True), reply.body
    assert not len(one.server.images)
    assert asyncio.run(one("GET", f"/images/{'0' * 64}")).status == 405  # images are never given out
    assert asyncio.run(one("PUT", "/images/a/b", b"")).status == 404


def test_a_server_is_shown_no_more_images_than_it_was_started_for(served):
    closed, one = served(), served(images=1)
    data = encode_image(picture())
    key = image_key(data)
    reply = asyncio.run(closed("POST", "/generate", request(prompt(key))))
    assert (reply.status, "--images N" in reply.json()["error"]) == (400, True)
    asyncio.run(one("PUT", f"/images/{key}", data))
    reply = asyncio.run(one("POST", "/generate", request(prompt(key, key))))
    assert (reply.status, "was started with --images 1" in reply.json()["error"]) == (400, True)


def test_a_prompt_of_which_the_engine_makes_other_tokens_is_refused_with_both_counts(served):
    one, data = served(images=1, expands_to=9), encode_image(picture())
    asyncio.run(one("PUT", f"/images/{image_key(data)}", data))
    reply = asyncio.run(one("POST", "/generate", request(prompt(image_key(data)))))
    assert (reply.status, reply.json()["kind"]) == (422, "PromptDiffers")
    assert "makes 9 tokens of a prompt that has 4 tokens" in reply.json()["error"]
    assert "3 x 5" in reply.json()["error"]
