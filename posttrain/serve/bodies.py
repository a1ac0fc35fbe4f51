"""The JSON bodies of requests as pydantic models, and the one sentence that says what is wrong with one."""

from __future__ import annotations

import base64
import ipaddress
import json
import uuid
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from .engine.engine_thread import ABORT, CONTINUE, DRAIN
from .engine.protocol import Accepted, Sampling
from .errors import FieldError, PayloadError, ServeError
from .wire.images import KEY
from .wire.payload import (
    CHECKSUMS,
    COLLECTIVE,
    CUDA_IPC,
    ITEM_BYTES,
    MAX_DIMENSIONS,
    MAX_FETCH_SECONDS,
    MAX_HEADER_BYTES,
    MAX_NAME,
    MAX_PARTS,
    MAX_REASON,
    MAX_TENSOR_BYTES,
    MAX_TENSORS,
    MAX_VERSION,
    PREFIX_BYTES,
    SHARED_MEMORY,
    Buffer,
    Manifest,
    TensorSpec,
)

MAX_PROMPTS, MAX_SAMPLES, MAX_TOP, MAX_TOKENS = 4096, 1024, 1024, 1 << 24
MAX_SHARED_BYTES = 1 << 40
MAX_IMAGES, MAX_MARK = 1024, 64
MAX_COUNTERS = 10_000
"""In one file of counters of shared GPU memory (CUDA_IPC_REF_COUNTER_FILE_SIZE of torch)."""


def _from_base64(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError("it should be base64")
    return base64.b64decode(value, validate=True)


def _digits_of_address(value: str) -> str:
    """The server looks up no names that others give it."""
    return str(ipaddress.ip_address(value))


Bytes = Annotated[bytes, BeforeValidator(_from_base64)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:\-]{1,200}$")]
Checksum = Annotated[str, Field(pattern=f"^({'|'.join(CHECKSUMS)}):[0-9a-f]{{32}}$")]
Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]
Seed = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
"""At most as many, and as large, as the model takes: see `generation.check_ids`."""
ImageOption = bool | int | float | str | None | list[int | float] | dict[str, int | float | None]
"""What options of image processors are made of."""
FetchSeconds = Annotated[float, Field(gt=0.0, le=MAX_FETCH_SECONDS)]
WaitSeconds = Annotated[float, Field(ge=0.0, le=3600.0)]


class Body(BaseModel):
    """An object with these fields and no others, each of exactly its type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


# tokens -----------------------------------------------------------------------------------------------------------------


class Accept(Body):
    min: Version = 0
    max: Version = MAX_VERSION


class TokenRequest(Body):
    """What all bodies that ask for tokens have in common."""

    request_id: Name = Field(default_factory=lambda: uuid.uuid4().hex)
    accept: Accept = Accept()
    deadline_s: Annotated[float, Field(gt=0.0)] | None = None  # at most that of the server's options
    base_weights: bool = False

    @property
    def accepted(self) -> Accepted:
        return Accepted(self.accept.min, self.accept.max)


class SamplingBody(Body):
    max_tokens: MaxTokens
    temperature: Annotated[float, Field(ge=0.0, le=1e6)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=1e6)] = 1.0
    stop_ids: Annotated[list[Annotated[int, Field(ge=0, le=1 << 31)]], Field(max_length=1024)] = []
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=64)] = []
    logit_bias: Annotated[
        list[Annotated[list[Annotated[float, Field(ge=-1e9, le=1e9)]], Field(min_length=2, max_length=2)]],
        Field(max_length=4096),
    ] = []
    regex: Annotated[str, Field(min_length=1, max_length=1 << 16)] | None = None

    def sampling(self) -> Sampling:
        lists = {
            "stop_ids": tuple(self.stop_ids),
            "stop": tuple(self.stop),
            "logit_bias": tuple((int(token), value) for token, value in self.logit_bias),
        }
        return Sampling(**(dict(self) | lists))


class PromptImage(Body):
    """An image that was sent before, and the tokens that stand for it."""

    key: Annotated[str, Field(pattern=KEY)]
    start: Annotated[int, Field(ge=0, le=MAX_TOKENS)]
    stop: Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class Noise(Body):
    """Of one completion, for engines whose noise is counted: the same wherever it is written."""

    base: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
    first_token: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0


class Prompt(Body):
    ids: TokenIds
    images: Annotated[list[PromptImage], Field(max_length=MAX_IMAGES, fail_fast=True)] = []
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    seeds: Annotated[list[Seed], Field(max_length=MAX_SAMPLES)] | None = None
    noise: Annotated[list[Noise], Field(max_length=MAX_SAMPLES)] | None = None
    max_tokens: MaxTokens | None = None


class Generate(TokenRequest):
    prompts: Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    sampling: SamplingBody
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    image_mark: Annotated[list[int], Field(max_length=MAX_MARK)] = []  # ids of what a template writes for an image
    image_options: Annotated[dict[Name, ImageOption], Field(max_length=MAX_MARK)] = {}  # of the image processor


class Sequence(Body):
    ids: TokenIds
    start: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 1


class Score(TokenRequest):
    sequences: Annotated[list[Sequence], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    top_k: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0


# weights ----------------------------------------------------------------------------------------------------------------


class TensorEntry(Body):
    """A tensor of a manifest."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]+$", max_length=MAX_NAME)]
    dtype: Literal[tuple(ITEM_BYTES)]
    shape: Annotated[list[Annotated[int, Field(ge=0, le=MAX_TENSOR_BYTES)]], Field(max_length=MAX_DIMENSIONS)]
    checksum: Checksum

    def spec(self) -> TensorSpec:
        spec = TensorSpec(self.name, self.dtype, tuple(self.shape), self.checksum)
        if spec.nbytes > MAX_TENSOR_BYTES:
            raise PayloadError(f"{self.name}: its shape means more than {MAX_TENSOR_BYTES} bytes.")
        return spec


class PieceEntry(TensorEntry):
    """A tensor, or a piece of one, in the header of a part."""

    offset: Annotated[int, Field(ge=0, le=MAX_TENSOR_BYTES)]
    begin: Annotated[int, Field(ge=0, le=MAX_TENSOR_BYTES)]
    end: Annotated[int, Field(ge=0, le=MAX_TENSOR_BYTES)]


class Header(Body):
    version: Version
    part: Annotated[int, Field(ge=0, le=MAX_PARTS)]
    parts: Annotated[int, Field(ge=1, le=MAX_PARTS)]
    tensors: Annotated[list[PieceEntry], Field(min_length=1, max_length=MAX_TENSORS, fail_fast=True)]


class ManifestBody(Body):
    version: Version
    parts: Annotated[int, Field(ge=1, le=MAX_PARTS)]
    tensors: Annotated[list[TensorEntry], Field(min_length=1, max_length=MAX_TENSORS, fail_fast=True)]

    def manifest(self) -> Manifest:
        refuse_duplicates([entry.name for entry in self.tensors])
        return Manifest(self.version, self.parts, tuple(entry.spec() for entry in self.tensors))


def refuse_duplicates(names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PayloadError(f"{name} is listed twice.")
        seen.add(name)


class Begin(Body):
    manifest: ManifestBody
    replace: bool = False
    rollback: bool = False
    adapter_config: dict[str, Any] | None = None


class Fetch(Body):
    transport: Literal[SHARED_MEMORY]
    head: Annotated[Bytes, Field(max_length=MAX_HEADER_BYTES + PREFIX_BYTES)]
    place: dict[str, Any]
    deadline_s: FetchSeconds = 60.0


class OpenStream(Body):
    version: Version
    rollback: bool = False
    in_flight: Literal[DRAIN, CONTINUE, ABORT] = DRAIN
    deadline_s: WaitSeconds = 60.0  # for the requests that run


class StreamPart(Body):
    version: Version
    part: Annotated[int, Field(ge=0, le=MAX_PARTS)]
    last: bool
    tensors: Annotated[list[PieceEntry], Field(min_length=1, max_length=MAX_TENSORS, fail_fast=True)]
    transport: Literal[CUDA_IPC, COLLECTIVE]
    place: dict[str, Any]
    deadline_s: FetchSeconds = 60.0


class SharedPlace(Body):
    name: Annotated[str, Field(min_length=1, max_length=200)]


class GroupPlace(Body):
    group: Annotated[str, Field(min_length=1, max_length=64)]


class GpuPlace(Body):
    gpu: Annotated[str, Field(min_length=1, max_length=100)]
    handle: Annotated[Bytes, Field(max_length=1 << 16)]
    size: Annotated[int, Field(ge=1, le=MAX_SHARED_BYTES)]
    offset: Annotated[int, Field(ge=0, le=MAX_SHARED_BYTES)]
    counter: Annotated[Bytes, Field(max_length=200)]
    counter_offset: Annotated[int, Field(ge=0, le=MAX_COUNTERS - 1)]
    event: Annotated[Bytes, Field(max_length=200)]
    event_sync: bool


class Rendezvous(Body):
    backend: Literal["gloo", "nccl"]
    address: Annotated[str, Field(max_length=64), AfterValidator(_digits_of_address)]
    port: Annotated[int, Field(ge=1, le=65535)]
    key: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    deadline_s: FetchSeconds = 60.0


class Commit(Body):
    version: Version
    in_flight: Literal[DRAIN, CONTINUE, ABORT] = DRAIN
    deadline_s: WaitSeconds = 60.0


class Abort(Body):
    version: Version
    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""


# the rest ---------------------------------------------------------------------------------------------------------------


class Sleep(Body):
    level: Annotated[int, Field(ge=1, le=2)] = 1


class Wake(Body):
    tags: Annotated[list[Literal["weights", "kv_cache"]], Field(min_length=1, max_length=2)] | None = None


class Shutdown(Body):
    deadline_s: WaitSeconds = 60.0


# reading ----------------------------------------------------------------------------------------------------------------

B = TypeVar("B", bound=Body)


def read_json(text: Buffer) -> Any:
    """Strict JSON: UTF-8, no NaN, no field twice, no nesting deep enough to exhaust the stack."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(fields := dict(pairs)) != len(pairs):
            raise PayloadError("The JSON has a field twice in one object.")
        return fields

    def refuse(constant: str) -> None:
        raise PayloadError(f"The JSON has the constant {constant}, which is not valid JSON.")

    try:
        return json.loads(bytes(text).decode(), object_pairs_hook=once, parse_constant=refuse)
    except PayloadError:
        raise
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"The JSON cannot be read ({type(error).__name__}).") from error


def read(value: Any, model: type[B], where: str = "the body", refusal: type[ServeError] = FieldError) -> B:
    """The body, or a refusal that names the first field that is wrong, where it stands, and what it must be."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise refusal(_sentence(model, first["type"], first["loc"], first["msg"], where)) from None


def _sentence(model: type[Body], wrong: str, path: tuple[int | str, ...], rule: str, where: str) -> str:
    """In pydantic's words what a value must be, and where in the body it stands."""
    if wrong in ("missing", "extra_forbidden"):
        inside, name = _place(path[:-1], where), f"`{str(path[-1])[:80]}`"
        if wrong == "missing":
            return f"{name} is missing from {inside}."
        known = f"; known are {', '.join(model.model_fields)}" if len(path) == 1 else ""
        return f"{name} is not a field of {inside}{known}."
    place = _place(path, where)
    return f"{place[0].upper()}{place[1:]} is wrong: {rule[0].lower()}{rule[1:]}."


def _place(path: tuple[int | str, ...], where: str) -> str:
    return " of ".join(
        [f"`{step[:80]}`" if isinstance(step, str) else f"entry {step}" for step in reversed(path)] + [where]
    )
