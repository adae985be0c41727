"""Addresses that servers listen on."""

import socket


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound to the address; OSError if that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        # Bound twice with SO_REUSEADDR, the second server fails only here.
        listening.listen(2048)
    except OSError as error:
        raise OSError(
            f"Port {port} of {host} cannot be used ({error.strerror or error}); choose another with --port."
        ) from error
    return listening
