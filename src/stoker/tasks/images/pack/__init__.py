"""`stoker pack`: images in any layout into tar shards with their index."""
