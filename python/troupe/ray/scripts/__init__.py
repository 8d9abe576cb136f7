"""The `ray` command."""
