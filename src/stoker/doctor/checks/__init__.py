"""Judges what was observed of a training loop. Pure: facts in, findings out; nothing is measured or printed here."""
