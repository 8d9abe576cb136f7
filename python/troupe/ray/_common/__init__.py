"""ray._common."""
