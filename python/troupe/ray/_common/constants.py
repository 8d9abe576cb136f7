"""ray._common.constants."""

HEAD_NODE_RESOURCE_NAME = "node:__internal_head__"
