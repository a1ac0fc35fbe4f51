"""What the server answers when it cannot do what it was asked: a sentence, and the HTTP status that goes with it."""

from __future__ import annotations


class ServeError(Exception):
    """A refusal. The message is a sentence for the caller; it never holds secrets or the bytes of a body."""

    status = 400


class PayloadError(ServeError):
    """A weight payload or a manifest that is not exactly what it must be."""


class FieldError(ServeError):
    """A field of a JSON body that is missing, unknown or out of bounds."""


class Unauthorised(ServeError):
    status = 401


class NotFound(ServeError):
    status = 404


class MethodNotAllowed(ServeError):
    status = 405


class TooSlow(ServeError):
    """The caller took too long to send what it announced."""

    status = 408


class Conflict(ServeError):
    """Right in itself, but not now: another update runs, or other weights serve than the caller accepts."""

    status = 409


class ImagesMissing(Conflict):
    """A prompt names images that this server does not have (any more): the caller sends them, and asks again."""


class TooLarge(ServeError):
    status = 413


class PromptDiffers(ServeError):
    """The engine makes other tokens of a prompt with images than the trainer has: completions would be of another prompt."""

    status = 422


class TransportFailed(ServeError):
    """The bytes of a part did not come by the way that was announced; they can still come over HTTP."""

    status = 424


class Busy(ServeError):
    status = 429


class EngineFailed(ServeError):
    """The engine could not do it; the caller is not to blame."""

    status = 500


class NotReady(ServeError):
    """No whole version serves, the engine sleeps, or the server is stopping."""

    status = 503


class Stopping(NotReady):
    """The server takes nothing new; what it has it still writes, or hands back."""


class DeadlinePassed(ServeError):
    status = 504
