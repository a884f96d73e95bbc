"""One file for each command: a table of contents of what it does. Imported when the command is called."""
