"""Where KV lives: geometry, memory region, block pool, block tables, prefix cache and scheduler."""
