"""Pictures come from where the operator allows it, and no request leaves for anywhere else."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from maxsimd.api.media import MediaFetcher, bytes_of_local_file, is_public
from maxsimd.engine.media import PictureError

MOST = 1_000
PICTURE = b"a picture's bytes"


def test_only_public_addresses_are_public() -> None:
    for address in ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2001:4860:4860::8888"):
        assert is_public(address), address
    for address in (
        *("127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.88.99.1"),
        *("::1", "::", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "fec0::1"),
        *("::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "192.0.0.192", "168.63.129.16", "3fff::1"),
        *("5f00::1", "2606::5efe:7f00:1", "2002:7f00:1::", "2001:0:4136:e378:8000:63bf:80ff:fffe"),
        *("localhost", "2130706433", "0x7f000001", "127.1", ""),
    ):
        assert not is_public(address), address


@dataclass
class Host:
    port: int = 0
    asked: list[str] = field(default_factory=list)

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def hosting() -> AsyncIterator[Host]:
    host = Host()

    async def answer(request: web.Request) -> web.StreamResponse:
        host.asked.append(request.path)
        kind = request.match_info["kind"]
        if kind == "redirect":
            raise web.HTTPFound(request.query["to"])
        if kind == "around":
            raise web.HTTPFound("/around")
        if kind == "slow":
            await asyncio.sleep(3600)
        if kind == "endless":
            response = web.StreamResponse(headers={"Content-Type": "image/png"})
            await response.prepare(request)
            while True:
                await response.write(bytes(1_000))
        if kind == "page":
            return web.Response(text="<html>")
        if kind == "gone":
            return web.Response(status=404, body=PICTURE, content_type="image/png")
        length = MOST + 1 if kind == "large" else 0
        return web.Response(body=PICTURE + bytes(length), content_type="image/png")

    app = web.Application()
    app.router.add_get("/{kind}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host.port = runner.addresses[0][1]
    try:
        yield host
    finally:
        await runner.cleanup()


@asynccontextmanager
async def fetching(
    *allowed: str, may_connect: Callable[[str], bool] = lambda address: True, seconds: float = 10.0
) -> AsyncIterator[MediaFetcher]:
    fetcher = MediaFetcher(allowed, MOST, may_connect=may_connect, seconds=seconds)
    try:
        yield fetcher
    finally:
        await fetcher.close()


async def test_a_picture_comes_from_a_host_that_is_allowed() -> None:
    async with hosting() as host, fetching(host.origin, f"http://localhost:{host.port}") as fetcher:
        assert await fetcher.fetch(f"{host.origin}/picture") == PICTURE
        assert await fetcher.fetch(f"http://LOCALHOST:{host.port}/picture?a=b#c") == PICTURE
        assert await fetcher.fetch(f"{host.origin}/redirect?to=/picture") == PICTURE
    async with hosting() as host, fetching(host.origin, may_connect=is_public) as fetcher:
        assert await fetcher.fetch(f"{host.origin}/picture") == PICTURE
        with pytest.raises(PictureError, match="fetches nothing"):
            await fetcher.fetch(f"{host.origin}/redirect?to=http://localhost:{host.port}/picture")
        assert host.asked == ["/picture", "/redirect"]


async def test_no_request_leaves_for_a_host_that_is_not_allowed() -> None:
    async with hosting() as host, fetching("example.com", f"http://example.com:{host.port}") as fetcher:
        for url in (
            *(f"{host.origin}/picture", f"http://localhost:{host.port}/picture"),
            *(f"https://127.0.0.1:{host.port}/picture", "http://example.com/picture"),
            *(f"http://2130706433:{host.port}/picture", f"http://[::ffff:127.0.0.1]:{host.port}/picture"),
            f"http://user:key@example.com@127.0.0.1:{host.port}/picture",
            *("http://example.com:99999999/", "http://example.com:0/", "http://[/"),
            *("http://example.com\\@127.0.0.1/", "http://example.com/" + "a" * 10_000),
            *("ftp://example.com/picture", "file:///etc/passwd", f"gopher://127.0.0.1:{host.port}/"),
            *("//127.0.0.1/picture", "http:///picture", "", "picture"),
        ):
            with pytest.raises(PictureError):
                await fetcher.fetch(url)
        assert host.asked == []
    for wrong in ("", "ftp://example.com", "https://", "http://user@example.com"):
        with pytest.raises(ValueError, match="names no host"):
            MediaFetcher([wrong], MOST)


async def test_an_allowed_host_is_asked_at_public_addresses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked_up(name: str, port: int, *options: object, **more: object) -> list[object]:
        found = ("8.8.8.8", "127.0.0.1")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    async with hosting() as host:
        names = dict.fromkeys(("localhost", "2130706433", "127.1"), "|cannot be") | {"media.example": ""}
        for name, other in names.items():
            if name == "media.example":
                monkeypatch.setattr(socket, "getaddrinfo", looked_up)
            origin = f"http://{name}:{host.port}"
            async with fetching(origin, may_connect=is_public) as fetcher:
                with pytest.raises(PictureError, match="whose address is not public" + other):
                    await fetcher.fetch(f"{origin}/picture")
        assert host.asked == []


async def test_each_redirect_is_checked() -> None:
    async with hosting() as host, hosting() as inside, fetching(host.origin) as fetcher:
        for to in (f"{inside.origin}/picture", "file:///etc/passwd", "http://169.254.169.254/latest"):
            with pytest.raises(PictureError):
                await fetcher.fetch(f"{host.origin}/redirect?to={to}")
        assert inside.asked == []
        with pytest.raises(PictureError, match="redirected more than 3 times"):
            await fetcher.fetch(f"{host.origin}/around")
        assert host.asked.count("/around") == 4


async def test_what_is_no_picture_too_large_or_slow_is_refused() -> None:
    async with hosting() as host, fetching(host.origin) as fetcher:
        for kind, said in (
            ("large", "has more than 1,000 bytes"), ("endless", "has more than 1,000 bytes"),
            ("page", "is fetched as text/plain"), ("gone", "answers with status 404"),
        ):  # fmt: skip
            with pytest.raises(PictureError, match=said):
                await fetcher.fetch(f"{host.origin}/{kind}")
    async with hosting() as host, fetching(host.origin, seconds=0.2) as fetcher:
        with pytest.raises(PictureError, match=r"was not received within 0\.2 s"):
            await fetcher.fetch(f"{host.origin}/slow")
    async with fetching(host.origin) as fetcher:
        with pytest.raises(PictureError, match="cannot be fetched"):
            await fetcher.fetch(f"{host.origin}/picture")


def test_files_are_read_from_the_folder_alone(tmp_path: Path) -> None:
    folder, outside = tmp_path / "pictures", tmp_path / "secret.png"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "a b.png").write_bytes(PICTURE)
    outside.write_bytes(PICTURE)
    (folder / "out.png").symlink_to(outside)
    (folder / "in.png").symlink_to(folder / "below" / "a b.png")
    (folder / "large.png").write_bytes(bytes(MOST + 1))
    assert bytes_of_local_file(f"file://{folder}/below/a%20b.png", folder, MOST) == PICTURE
    assert bytes_of_local_file(f"file://{folder}/in.png", folder, MOST) == PICTURE
    # A link outside tells nothing: not even where it leads, if that is back.
    (tmp_path / "link").symlink_to(folder)
    outside_paths = (f"{tmp_path}/link/in.png", f"{tmp_path}/link/../pictures/in.png", f"{outside}")
    outside_paths += (f"{folder}/../secret.png", f"{folder}/%2e%2e/secret.png", f"{folder}/out.png")
    outside_paths += (f"{folder}x/a.png", f"{tmp_path}/not-there.png")
    refused = {f"file://{path}": "outside of the folder" for path in outside_paths} | {
        f"file://{'/a' * 100_000}": "has a URL that cannot be read",
        "file://[": "has a URL that cannot be read",
        f"file://{folder}/not-there.png": "cannot be opened",
        f"file://{folder}/a%00b.png": "cannot be opened",
        f"file://{folder}": "no regular file",
        f"file://{folder}/large.png": "has 1,001 bytes",
        f"file://host{folder}/in.png": "has a URL that cannot be read",
        f"{folder}/in.png": "has a URL that cannot be read",
    }
    for url, said in refused.items():
        with pytest.raises(PictureError, match=said):
            bytes_of_local_file(url, folder, MOST)
    with pytest.raises(PictureError, match="which reads none"):
        bytes_of_local_file(f"file://{folder}/in.png", None, MOST)
