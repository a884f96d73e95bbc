"""One file for each loader that is measured; each runs in a process, and the peers in an environment of their own."""
