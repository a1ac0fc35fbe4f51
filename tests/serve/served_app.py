"""The whole application over the scripted engine, called without sockets."""

from __future__ import annotations

from posttrain.serve.http.app import build_app
from posttrain.serve.server import RolloutServer, ServerOptions
from posttrain.serve.wire.payload import encode_manifest
from tests.serve.asgi_client import call
from tests.serve.echo_engine import EchoEngine, numbered_weights
from tests.serve.serving import update_of

TOKEN = "a-token-of-the-tests-7c1"


class Served:
    def __init__(self, token=TOKEN, options=None, made=None, **engine):
        """`made`: an engine, if not one without a model."""
        self.engine = EchoEngine(numbered_weights(0), **engine) if made is None else made
        self.server = RolloutServer(
            self.engine,
            options
            or ServerOptions(**dict.fromkeys(("most_json_bytes", "most_part_bytes", "most_image_bytes"), 1 << 16)),
        )
        self.server.start()
        self.app = build_app(self.server, token)
        self.token = token

    async def __call__(self, method, path, body=b"", **more):
        return await call(self.app, method, path, body, **({"token": self.token} | more))

    async def push(self, version, **commit):
        manifest, payloads = update_of(version, numbered_weights(version))
        replies = [await self("POST", "/weights/begin", {"manifest": encode_manifest(manifest)})]
        for payload in payloads:
            replies.append(await self("POST", "/weights/part", payload))
        replies.append(await self("POST", "/weights/commit", {"version": version} | commit))
        assert [reply.status for reply in replies] == [200] * len(replies), replies[-1].body
        return replies[-1].json()


def asked(request_id="r1", tokens=4, **more):
    return {"request_id": request_id, "prompts": [{"ids": [1, 2]}], "sampling": {"max_tokens": tokens}, **more}
