"""`python -m stoker` is the same program as `stoker`."""

from stoker.cli import run

if __name__ == "__main__":
    run()
