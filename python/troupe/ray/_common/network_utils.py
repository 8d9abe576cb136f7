"""ray._common.network_utils: addresses and ports."""

from __future__ import annotations

import ipaddress
import socket

from .._nodes import node_ip

__all__ = ["build_address", "find_free_port", "is_localhost", "node_ip_address_from_perspective", "parse_address"]


def build_address(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, str] | None:
    """Returns the host and the port of an address, or None if it has no port."""
    host, _, port = address.rpartition(":")
    if not host or (":" in host and not host.startswith("[")):
        return None
    return host.strip("[]"), port


def is_localhost(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def node_ip_address_from_perspective(address: str = "") -> str:
    return node_ip()


def find_free_port(family: socket.AddressFamily = socket.AF_INET) -> int:
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])
