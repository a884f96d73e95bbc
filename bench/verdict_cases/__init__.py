"""Scripts with one known fault each, for bench/verdicts.py: the right verdict is known in advance."""
