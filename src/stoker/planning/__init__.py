"""What a config will need before anything runs: memory, time and money."""
