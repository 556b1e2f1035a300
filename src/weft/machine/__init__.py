"""The machine and its processes: processor, memory, device and precision, the operating system."""
