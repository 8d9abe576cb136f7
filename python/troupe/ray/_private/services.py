"""ray._private.services: addresses."""

from __future__ import annotations

from .._nodes import node_ip


def get_node_ip_address(address: str = "8.8.8.8:53") -> str:
    return node_ip()


def get_node_instance_id() -> str:
    return ""
