"""Images from http and https URLs, under limits, kept in a folder: a URL is asked for once.

A URL in a dataset is chosen by the dataset's author, and the machine that trains can reach what the author cannot: services on its
own ports, the metadata of a cloud. So every address is checked after it is resolved, and that very address is connected to, also at
every redirect. No credentials, no cookies, no proxies of the environment.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import ssl
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import httpcore
import xxhash

from posttrain.core import __version__
from posttrain.core.secrets import write_whole
from posttrain.core.transport import Address, Link
from posttrain.data.images.limits import BadImage, ImageLimits, shown

CONNECT_SECONDS, WHOLE_SECONDS = 10.0, 60.0
MAX_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
NAT64 = ipaddress.ip_network("64:ff9b::/96")


def downloaded(url: str, limits: ImageLimits, may_download: bool = True) -> bytes:
    """The bytes behind a URL: from `limits.download_folder` where they are kept, else from the network."""
    folder = Path(limits.download_folder)
    record = folder / f"{xxhash.xxh3_128_hexdigest(url.encode(errors='surrogatepass'))}.json"
    data = _kept(record, url)
    if data is None:
        if not may_download:
            raise BadImage("image_changed", f"{shown(url)} is not in {folder} any more: prepare the dataset again.")
        data = _download(url, limits)
        folder.mkdir(parents=True, exist_ok=True)
        key = xxhash.xxh3_128_hexdigest(data)
        write_whole(folder / key, data, private=False)
        write_whole(record, json.dumps({"url": url, "key": key}), private=False)
    return data


def _kept(record: Path, url: str) -> bytes | None:
    """What an earlier run downloaded; None where there is nothing, or a damaged file."""
    if not record.exists():
        return None
    try:
        known = json.loads(record.read_bytes())
        kept = record.with_name(known["key"])
    except (ValueError, KeyError, TypeError):  # a disk that was full, an older layout: it is written again
        return None
    data = kept.read_bytes() if kept.exists() else b""
    return data if known["url"] == url and xxhash.xxh3_128_hexdigest(data) == known["key"] else None


# ------------------------------------------------------------------------------------------------------------- the network


def is_public(address: str) -> bool:
    """Not private, loopback, link-local, multicast or reserved, nor an IPv6 form of such an address."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if found in NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if found.is_site_local:
            return False
    return found.is_global and not (found.is_multicast or found.is_reserved)


def public_addresses(host: str, port: int) -> list[str]:
    try:
        found = [entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise BadImage("image_download", f"The address of {host} was not found ({error}).") from error
    for address in found:
        if not is_public(address):
            raise BadImage(
                "image_url", f"{host} has the address {address}, which is not public: it is not asked for images."
            )
    return list(dict.fromkeys(found))


class _PublicLink(Link):
    """A connection to the addresses that were checked; a second resolution could give others."""

    def connect_tcp(self, host: str, port: int, timeout: Any = None, **more: Any) -> Link:
        *others, last = public_addresses(host, port)
        for address in others:
            try:
                return super().connect_tcp(address, port, timeout, **more)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue  # the next one may answer: a host with IPv6 that this network does not have
        return super().connect_tcp(last, port, timeout, **more)


def _download(url: str, limits: ImageLimits) -> bytes:
    deadline = time.monotonic() + WHOLE_SECONDS
    here = url
    for _ in range(MAX_REDIRECTS + 1):
        try:
            moved, data = _ask(here, deadline, limits)
        except httpcore.TimeoutException as error:
            raise BadImage(
                "image_download",
                f"{shown(here)} was not downloaded in time ({CONNECT_SECONDS:g} s to connect, {WHOLE_SECONDS:g} s in all).",
            ) from error
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            raise BadImage("image_download", f"{shown(here)} was not downloaded ({error}).") from error
        if moved is None:
            return data
        try:
            here = urljoin(here, moved)
        except ValueError as error:
            raise BadImage("image_url", f"{shown(here)} is redirected to what is not a URL: {error}.") from error
    raise BadImage("image_download", f"{shown(url)} was redirected more than {MAX_REDIRECTS} times.")


def _ask(url: str, deadline: float, limits: ImageLimits) -> tuple[str | None, bytes]:
    """One request: where the answer says to look instead, or None and the body."""
    address, target = _split(url)
    link = _PublicLink(address, CONNECT_SECONDS, ssl.create_default_context() if address.scheme == "https" else None)
    link.begin(deadline)
    headers = [("Host", address.netloc), ("User-Agent", f"posttrain/{__version__}"), ("Accept-Encoding", "identity")]
    asked = httpcore.URL(scheme=address.scheme, host=address.host, port=address.port, target=target)
    try:
        with link.http.stream("GET", asked, headers=headers) as reply:
            answered = {name.lower(): value.decode("latin-1") for name, value in reply.headers}
            if reply.status in REDIRECTS and b"location" in answered:
                return answered[b"location"], b""
            if reply.status != 200:
                raise BadImage("image_download", f"{shown(url)} answered with status {reply.status}.")
            body = bytearray()
            for piece in reply.iter_stream():
                body += piece
                if len(body) > limits.max_bytes:
                    raise BadImage(
                        "image_too_large",
                        f"{shown(url)} has more than {limits.max_bytes:,} bytes, which is what `max_image_bytes` allows.",
                    )
            return None, bytes(body)
    finally:
        link.http.close()
        link.close()


def _split(url: str) -> tuple[Address, str]:
    """Server, and path with query, in ASCII."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode()
        port = parts.port or (443 if parts.scheme == "https" else 80)
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
        query = quote(parts.query, safe="/%:@!$&'()*+,;=~?")
    except ValueError as error:  # UnicodeError is one
        raise BadImage("image_url", f"{shown(url)} is not a URL: {error}.") from error
    if parts.scheme not in ("http", "https") or not host:
        raise BadImage("image_url", f"{shown(url)} is not an http or https URL: no other is downloaded.")
    if parts.username is not None or parts.password is not None:
        raise BadImage(
            "image_url", f"A URL of {host} has a user name or a password in it: such URLs are not downloaded."
        )
    return Address(parts.scheme, host, port, ""), f"{path}?{query}" if query else path
