"""What a change would bring: the loader simulated with measured times, and predictions from that."""
