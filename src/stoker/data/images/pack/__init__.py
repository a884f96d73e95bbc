"""`stoker pack`: class folders into tar shards with their index."""
