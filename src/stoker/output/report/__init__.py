"""report.html: a run, or two beside each other, as one page that needs nothing else."""
