"""The topics of `python -m perf`. Each file registers one, with its measurement, rows, tables and figures."""
