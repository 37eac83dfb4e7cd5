"""Set up the process: threads, memory, OpenMP, processor, devices and files."""
