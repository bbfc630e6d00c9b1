"""Where a server listens: an address or a Unix socket, and with which certificate."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

from noria.config import ServerOptions
from noria.errors import ConfigError

BACKLOG = 2048


@contextlib.contextmanager
def listening(options: ServerOptions) -> Iterator[socket.socket]:
    """A listening socket until the block ends; a Unix socket's file is removed then.

    Raises:
        ConfigError: it cannot be; names the flag.
    """
    if options.uds is None:
        with _bind(options.host, options.port) as listener:
            yield listener
        return
    path = Path(options.uds)
    with _bind_unix(path, int(options.uds_permissions, 8)) as listener:
        made = path.stat().st_ino
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if path.stat().st_ino == made:  # another server may have taken the place
                    path.unlink()


def url_of(listener: socket.socket, secure: bool) -> str:
    """What clients use as their base URL; of a Unix socket, its path after `unix:`."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if secure else 'http'}://{shown}:{port}/v1"


def certificate(options: ServerOptions) -> ssl.SSLContext | None:
    """What TLS needs, at least 1.2; None: none is wanted.

    Raises:
        ConfigError: a file that cannot be read or does not fit; names the flag.
    """
    if options.ssl_certfile is None:
        for flag, value in (
            ("--ssl-keyfile", options.ssl_keyfile),
            ("--ssl-keyfile-password", options.ssl_keyfile_password),
            ("--ssl-ca-certs", options.ssl_ca_certs),
        ):
            if value is not None:
                raise ConfigError("needs --ssl-certfile as well", flag)
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _check_file(options.ssl_certfile, "--ssl-certfile")
    if options.ssl_keyfile is not None:
        _check_file(options.ssl_keyfile, "--ssl-keyfile")
    _load(context, options.ssl_certfile, options.ssl_keyfile, options.ssl_keyfile_password)
    if options.ssl_ca_certs is not None:
        _check_file(options.ssl_ca_certs, "--ssl-ca-certs")
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except ssl.SSLError as error:
            raise ConfigError(f"{options.ssl_ca_certs} has no certificates in PEM: {error}", "--ssl-ca-certs") from None
        context.verify_mode = ssl.CERT_REQUIRED  # clients must show a certificate of theirs
    return context


def _load(context: ssl.SSLContext, certificate: str, key: str | None, password: str | None) -> None:
    asked = False

    def tell() -> str:  # or OpenSSL would ask on the terminal
        nonlocal asked
        asked = True
        return password or ""

    try:
        context.load_cert_chain(certificate, key, tell)
    except ssl.SSLError as error:
        if asked:
            what = "the key is encrypted, and this is not its password" if password else "the key is encrypted"
            raise ConfigError(f"{what}; give the right one", "--ssl-keyfile-password") from None
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{key or certificate} is not the key of {certificate}", "--ssl-keyfile") from None
        where = f"{certificate} and {key}" if key else f"{certificate} (a key is needed too: --ssl-keyfile)"
        raise ConfigError(f"not a certificate and its key in PEM: {where}", "--ssl-certfile") from None


def _check_file(path: str, flag: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}", flag) from None


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; choose another", "--port") from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"port {port} needs more rights; choose one above 1023", "--port") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}", "--host") from None
    return listener


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One process at a time looks whether a socket there is in use and puts its own in its place: of several that start
    together, one would otherwise remove what another has just made."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield  # it may be entered, but not read; or `bind` will say what is wrong
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _bind_unix(path: Path, permissions: int) -> socket.socket:
    with _alone_in(path.parent):
        return _bind_alone(path, permissions)


def _bind_alone(path: Path, permissions: int) -> socket.socket:
    _clear(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777)  # nobody can connect before the permissions are what they shall be
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}", "--uds") from None
    finally:
        os.umask(before)
    path.chmod(permissions)
    listener.listen(BACKLOG)
    return listener


def _clear(path: Path) -> None:
    """Removes the socket of a server that is gone. Anything else stays, and is an error."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # there is nothing, or `bind` will say what is wrong
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is no socket; choose another path", "--uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError as error:
            raise ConfigError(f"{path} is in use or not ours: {error.strerror or error}", "--uds") from None
        else:
            raise ConfigError(f"a server listens on {path} already; choose another path", "--uds")
