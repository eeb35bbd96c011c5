"""Calls without kernels: over a process group, host by host, or within this process."""
