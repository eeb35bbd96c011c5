"""One file a topic of `python -m perf`: what it measures, its rows, tables and figures. Each registers itself."""
