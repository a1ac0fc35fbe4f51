"""What the viewer refuses, in words for the caller."""

from __future__ import annotations


class ViewError(Exception):
    """Has the status of its answer."""

    status = 400


class NotFound(ViewError):
    status = 404


class Refused(ViewError):
    status = 403


class Unauthorized(ViewError):
    status = 401


class WrongMethod(ViewError):
    status = 405


class TooLarge(ViewError):
    status = 413


class NoRunError(ViewError):
    """The given path holds no run."""
