"""How scattered blocks become flat: gather plans, buckets, staging buffers and their life cycle."""
