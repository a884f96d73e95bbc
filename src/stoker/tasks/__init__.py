"""The kinds of work: what their data, model, loss and metrics are."""
