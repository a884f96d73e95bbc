"""A config or a script, for some seconds, in a throw-away process under a memory and a time limit."""
