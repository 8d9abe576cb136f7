"""ray._private.ray_logging: a setting that programs change. Troupe prints every line of the workers."""

RAY_DEDUP_LOGS = False
