"""The commands of `python -m graphar`: doctor, bench, explain, tune, simulate and trace."""
