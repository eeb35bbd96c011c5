"""The commands of `python -m graphar`: doctor, bench, explain, tune, report and trace."""
