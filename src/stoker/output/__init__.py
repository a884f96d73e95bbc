"""The only places that print; they decide nothing."""
