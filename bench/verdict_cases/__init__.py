"""Scripts with a known fault each, for bench/verdicts.py: what the doctor should say is known before it looks."""
