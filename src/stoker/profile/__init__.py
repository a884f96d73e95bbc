"""Where the time of a batch and of a step goes; what this host has: cores, memory, disks, accelerators."""
