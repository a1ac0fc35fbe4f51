"""The parser of weight payloads: exactly what was sent, or a PayloadError; 5,000 damaged payloads."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.rollout.engines.vllm import kept_weights
from posttrain.rollout.engines.vllm.kept_weights import plan_parts
from posttrain.serve.bodies import ManifestBody, read
from posttrain.serve.errors import PayloadError
from posttrain.serve.weights.staging import Staging
from posttrain.serve.wire import payload
from posttrain.serve.wire.host_memory import HostMemory
from posttrain.serve.wire.payload import ITEM_BYTES, MAGIC, PREFIX_BYTES, Manifest, TensorSpec
from tests.serve.serving import encoded, parsed

SPECS = st.builds(
    TensorSpec,
    name=st.from_regex(r"[A-Za-z0-9_.\-]{1,30}", fullmatch=True),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
)


@st.composite
def parts(draw):
    """(version, part, parts, tensors with their bytes) and the payload."""
    specs = draw(st.lists(SPECS, min_size=1, max_size=5, unique_by=lambda spec: spec.name))
    tensors = [(spec, 0, draw(st.binary(min_size=spec.nbytes, max_size=spec.nbytes))) for spec in specs]
    count = draw(st.integers(1, 9))
    head = (draw(st.integers(0, payload.MAX_VERSION)), draw(st.integers(0, count - 1)), count)
    kind = draw(st.sampled_from(sorted(payload.CHECKSUMS)))
    return head, tensors, encoded(*head, tensors, kind)


def assert_exact(part, head, tensors):
    assert (part.version, part.part, part.parts) == head
    assert [(p.name, p.dtype, p.shape, p.offset, bytes(p.data)) for p in part.pieces] == [
        (spec.name, spec.dtype, spec.shape, offset, data) for spec, offset, data in tensors
    ]


def with_header(body: bytes, header: bytes) -> bytes:
    """The payload with another header and the right digest, as an attacker would send it."""
    length = int.from_bytes(body[len(MAGIC) : len(MAGIC) + 4], "little")
    data = body[PREFIX_BYTES + length :]
    return MAGIC + len(header).to_bytes(4, "little") + payload.header_digest(header) + header + data


def header_of(body: bytes) -> dict:
    length = int.from_bytes(body[len(MAGIC) : len(MAGIC) + 4], "little")
    return json.loads(body[PREFIX_BYTES : PREFIX_BYTES + length])


@settings(max_examples=200, deadline=None)
@given(parts())
def test_what_was_encoded_is_what_is_read(case):
    head, tensors, body = case
    assert_exact(parsed(body), head, tensors)


def bit_flip(body, rng):
    damaged = bytearray(body)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def cut(body, rng):
    return body[: rng.randrange(len(body))]


def grown(body, rng):
    return body + rng.randbytes(rng.randint(1, 40))


def spliced(body, rng):
    at = rng.randrange(len(body))
    return body[:at] + rng.randbytes(rng.randint(1, 12)) + body[at + rng.randint(0, 12) :]


def other_length(body, rng):
    return body[: len(MAGIC)] + rng.randrange(1 << 32).to_bytes(4, "little") + body[len(MAGIC) + 4 :]


ODD = [
    -1,
    1 << 63,
    1 << 200,
    1.5,
    True,
    None,
    "",
    "x",
    [],
    {},
    [[]],
    {"a": 1},
    "float32",
    "object",
    [1 << 40] * 8,
    0,
    1,
    2,
]


def odd_field(body, rng):
    header = header_of(body)
    target = header if rng.random() < 0.3 else rng.choice(header["tensors"])
    key = rng.choice(sorted(target))
    target[key] = rng.choice(ODD)
    if rng.random() < 0.2:
        target.pop(key)
    if rng.random() < 0.2:
        target[rng.choice(["pickle", "name2", ""])] = rng.choice(ODD)
    return with_header(body, json.dumps(header).encode())


def twice(body, rng):
    header = header_of(body)
    header["tensors"].append(rng.choice(header["tensors"]))
    return with_header(body, json.dumps(header).encode())


def odd_json(body, rng):
    depth = rng.choice([10, 1_000, 100_000])
    number = "9" * rng.choice([30, 5_000])
    return with_header(
        body,
        rng.choice(
            [
                b"[" * depth,
                b"[" * depth + b"]" * depth,
                b'{"tensors":' * depth + b"1" + b"}" * depth,
                f'{{"version":{number},"part":0,"parts":1,"tensors":[]}}'.encode(),
                b'{"version":NaN,"part":0,"parts":1,"tensors":[]}',
                b'{"version":1,"version":2,"part":0,"parts":1,"tensors":[]}',
                b"\xff\xfe",
                b'"\\ud800"',
                b"",
                b"null",
                rng.randbytes(20),
            ]
        ),
    )


DAMAGES = [bit_flip, cut, grown, spliced, other_length, odd_field, twice, odd_json]


def random_part(rng):
    """As `parts` draws them, fifty times faster."""
    specs = [
        TensorSpec(
            f"t{i}.weight", rng.choice(sorted(ITEM_BYTES)), tuple(rng.randint(0, 4) for _ in range(rng.randint(0, 3)))
        )
        for i in range(rng.randint(1, 5))
    ]
    tensors = [(spec, 0, rng.randbytes(spec.nbytes)) for spec in specs]
    count = rng.randint(1, 9)
    head = (rng.randint(0, payload.MAX_VERSION), rng.randrange(count), count)
    return head, tensors, encoded(*head, tensors, rng.choice(sorted(payload.CHECKSUMS)))


def test_5000_damaged_payloads_give_the_typed_error_or_the_exact_tensors():
    for seed in range(5_000):
        rng = random.Random(seed)
        damage = DAMAGES[seed % len(DAMAGES)]
        head, tensors, body = random_part(rng)
        try:
            part = parsed(damage(body, rng))
        except PayloadError:
            continue
        # Only a header written anew with its digest may mean something else, and then the bytes are still those sent.
        if damage is odd_field:
            assert [bytes(p.data) for p in part.pieces] == [data for _, _, data in tensors], seed
            assert all(len(p.data) + p.offset <= TensorSpec(p.name, p.dtype, p.shape).nbytes for p in part.pieces), seed
        else:
            assert_exact(part, head, tensors)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    for body in (noise, MAGIC + noise):
        with pytest.raises(PayloadError):
            parsed(body)


@settings(max_examples=300, deadline=None)
@given(st.lists(SPECS, min_size=1, max_size=6, unique_by=lambda spec: spec.name), st.integers(1, 70))
def test_parts_cover_every_byte_once_within_the_bound(specs, bucket):
    covered = {spec.name: 0 for spec in specs}
    for part in plan_parts(specs, bucket):
        assert 0 <= sum(piece.length for piece in part) <= bucket
        for piece in part:
            assert piece.offset == covered[piece.spec.name]
            covered[piece.spec.name] += piece.length
    assert covered == {spec.name: spec.nbytes for spec in specs}


def test_the_manifest_reads_back_and_refuses_a_name_twice():
    specs = (
        TensorSpec("a", "float32", (2, 3), payload.checksum(b"x")),
        TensorSpec("b", "bfloat16", (), payload.checksum(b"y")),
    )
    manifest = Manifest(3, 2, specs)
    fields = json.loads(json.dumps(payload.encode_manifest(manifest)))
    assert read(fields, ManifestBody).manifest() == manifest
    fields["tensors"].append(fields["tensors"][0])
    with pytest.raises(PayloadError, match="a is listed twice"):
        read(fields, ManifestBody).manifest()


# blocks of a checksum ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 8 bytes; a list of how many bytes were hashed at each call for a block."""
    monkeypatch.setattr(payload, "HASH_BLOCK", 8)
    monkeypatch.setattr(kept_weights, "HASH_BLOCK", 8)
    hashed, real = [], payload.CHECKSUMS["blake2b"]
    counted = {"blake2b": lambda data: (hashed.append(len(data)), real(data))[1]}
    monkeypatch.setattr(payload, "CHECKSUMS", counted)
    return hashed


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 16, 17, 40])
def test_a_checksum_is_that_of_the_digests_of_the_blocks(small_blocks, nbytes):
    data = random.Random(nbytes).randbytes(nbytes)
    digests = [payload._blake2b(data[at : at + 8]) for at in range(0, nbytes, 8)] or [payload._blake2b(b"")]
    whole = digests[0] if nbytes <= 8 else payload._blake2b("".join(digests).encode())
    assert payload.checksum(data) == f"blake2b:{whole}"
    for begin in range(0, nbytes, 8):
        for end in {*range(begin + 8, nbytes, 8), nbytes}:
            blocks = payload.blocks_between(begin, end, nbytes)
            assert payload.combined(digests[blocks.start : blocks.stop], "blake2b") == payload.checksum(data[begin:end])
    assert payload.blocks_between(1, nbytes, nbytes) is None
    assert payload.blocks_between(0, nbytes + 3, nbytes + 30) is None or (nbytes + 3) % 8 == 0


@pytest.mark.parametrize(("bucket", "times"), [(8, 1), (20, 1), (24, 1), (1000, 1), (5, 2)])
def test_a_server_hashes_every_byte_once_where_tensors_are_cut_between_blocks(small_blocks, bucket, times):
    specs = [TensorSpec(name, "uint8", (size,)) for name, size in (("a", 3), ("b", 61), ("c", 8), ("d", 40))]
    data = {spec.name: random.Random(spec.name).randbytes(spec.nbytes) for spec in specs}
    specs = [TensorSpec(s.name, s.dtype, s.shape, payload.checksum(data[s.name])) for s in specs]
    plan = plan_parts(specs, bucket)
    bodies = [
        encoded(1, i, len(plan), [(s.spec, s.offset, data[s.spec.name][s.offset : s.offset + s.length]) for s in part])
        for i, part in enumerate(plan)
    ]
    small_blocks.clear()
    staging = Staging(Manifest(1, len(plan), tuple(specs)), HostMemory())
    for number, body in enumerate(bodies):
        staging.add(parsed(body), str(number))
    staging.verify()
    of_blocks = sum(size for size in small_blocks if size <= 8)  # digests are hashed, too: 32 digits for each block
    cut_in_pieces = sum(s.nbytes for s in specs if s.nbytes > bucket)
    assert of_blocks == sum(s.nbytes for s in specs) + (times - 1) * cut_in_pieces
    assert {name: bytes(held) for name, held in staging._bytes.items()} == data


def test_whole_blocks_that_are_not_those_of_the_manifest_are_noticed_at_the_end(small_blocks):
    """Every piece has its own checksum; together they are another tensor than the one that was announced."""
    right, wrong = bytes(range(24)), bytes(range(8, 24)) + bytes(range(8))
    spec = TensorSpec("a", "uint8", (24,), payload.checksum(right))
    for data, is_right in ((right, True), (wrong, False)):
        staging = Staging(Manifest(1, 3, (spec,)), HostMemory())
        for part in range(3):
            staging.add(parsed(encoded(1, part, 3, [(spec, 8 * part, data[8 * part : 8 * part + 8])])), str(part))
        if is_right:
            staging.verify()
            continue
        with pytest.raises(PayloadError, match="once its pieces are put together"):
            staging.verify()
